package servertest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"strings"
	"time"

	"agentrun.dev/internal/sandbox"
)

// authorities: a namespace has no CA, one for its first template that trusts it, and others
// that are set.
func (s *suite) authorities() {
	_, err := s.Service.NamespaceCA(s.ctx, s.namespace)
	s.missing("a CA of nobody", err)
	s.Template.TrustNamespaceCA = true
	first, err := s.Service.ApplyTemplate(s.ctx, s.key("trusting"), s.Template)
	s.must(err)
	made, err := s.Service.NamespaceCA(s.ctx, s.namespace)
	s.must(err)
	if made.Namespace != s.namespace || !strings.Contains(made.Certificate, "BEGIN CERTIFICATE") || len(made.Fingerprint) != 64 ||
		len(made.Names) != 0 || made.Created.IsZero() || !made.Expires.After(made.Created) || !strings.Contains(made.Subject, string(s.namespace)) {
		s.Errorf("the CA is %+v", made)
	}
	set, err := s.Service.SetNamespaceCA(s.ctx, s.namespace, sandbox.CASpec{Names: []string{"api.example.org"}})
	s.must(err)
	if set.Fingerprint == made.Fingerprint || len(set.Names) != 1 || set.Names[0] != "api.example.org" {
		s.Errorf("the CA after it was set is %+v", set)
	}
	if got, err := s.Service.NamespaceCA(s.ctx, s.namespace); err != nil || got.Fingerprint != set.Fingerprint {
		s.Errorf("%+v, %v", got, err)
	}
	again, err := s.Service.Template(s.ctx, s.key("trusting"))
	s.must(err)
	if again.Revision == first.Revision {
		s.Errorf("the template is still of revision %s with another CA", again.Revision)
	}
	certificate, key, err := ownCA("given.example.org")
	s.must(err)
	given, err := s.Service.SetNamespaceCA(s.ctx, s.namespace, sandbox.CASpec{Certificate: certificate, Key: sandbox.CAKey(key)})
	s.must(err)
	if given.Certificate != certificate || len(given.Names) != 1 || given.Names[0] != "given.example.org" || strings.Contains(fmt.Sprintf("%+v", given), "PRIVATE") {
		s.Errorf("the CA that an administrator has made is %+v", given)
	}
	set = given
	for what, spec := range map[string]sandbox.CASpec{
		"no name":               {Names: []string{"*"}},
		"an address":            {Names: []string{"10.0.0.1"}},
		"too many names":        {Names: make([]string, sandbox.MaxCANames+1)},
		"no key":                {Certificate: set.Certificate},
		"no certificate":        {Key: "key"},
		"both":                  {Names: []string{"a.example"}, Certificate: set.Certificate, Key: "key"},
		"a key that is no key":  {Certificate: set.Certificate, Key: "secret-canary"},
		"a certificate of none": {Certificate: "x", Key: "secret-canary"},
	} {
		_, err := s.Service.SetNamespaceCA(s.ctx, s.namespace, spec)
		s.refused(what, err, sandbox.CodeInvalid)
		if err != nil && strings.Contains(err.Error(), "secret-canary") {
			s.Errorf("%s: the error shows the key: %v", what, err)
		}
	}
	if got, err := s.Service.NamespaceCA(s.ctx, s.namespace); err != nil || got.Fingerprint != set.Fingerprint {
		s.Errorf("what was refused has changed the CA to %+v, %v", got, err)
	}
}

// ownCA makes a CA for one name, as an administrator does who has one for all nodes.
func ownCA(name string) (certificate, key string, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", "", err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "An administrator's CA"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
		PermittedDNSDomainsCritical: true, PermittedDNSDomains: []string{name},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		return "", "", err
	}
	b, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return "", "", err
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: b})), nil
}
