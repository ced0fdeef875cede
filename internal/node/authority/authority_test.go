package authority

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/network/policy"
)

func newCA(t *testing.T, names ...policy.Name) *Authority {
	t.Helper()
	a, err := New("default", names, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// sign makes a certificate as somebody would who has the CA's key, and verifies it as clients
// do.
func sign(t *testing.T, a *Authority, template x509.Certificate, usage ...x509.ExtKeyUsage) error {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template.SerialNumber, template.NotBefore, template.NotAfter = big.NewInt(7), time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	der, err := x509.CreateCertificate(rand.Reader, &template, a.cert, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(a.cert)
	_, err = leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: usage})
	return err
}

// TestConstraints: the names for which clients accept a CA, even if its key
// signs for others.
func TestConstraints(t *testing.T) {
	server := []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	any, limited := newCA(t), newCA(t, "openai.com", "api.example.org")
	for _, c := range []struct {
		name     string
		template x509.Certificate
		usage    x509.ExtKeyUsage
		any, ok  bool // believed of a CA for all names, and of the limited one
	}{
		{"a permitted name", x509.Certificate{DNSNames: []string{"openai.com"}, ExtKeyUsage: server}, x509.ExtKeyUsageServerAuth, true, true},
		{"below one", x509.Certificate{DNSNames: []string{"api.openai.com"}, ExtKeyUsage: server}, x509.ExtKeyUsageServerAuth, true, true},
		{"another name", x509.Certificate{DNSNames: []string{"example.org"}, ExtKeyUsage: server}, x509.ExtKeyUsageServerAuth, true, false},
		{"one that ends alike", x509.Certificate{DNSNames: []string{"evilopenai.com"}, ExtKeyUsage: server}, x509.ExtKeyUsageServerAuth, true, false},
		{"two names", x509.Certificate{DNSNames: []string{"openai.com", "example.org"}, ExtKeyUsage: server}, x509.ExtKeyUsageServerAuth, true, false},
		{"an address", x509.Certificate{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: server}, x509.ExtKeyUsageServerAuth, false, false},
		{"an address of IPv6", x509.Certificate{IPAddresses: []net.IP{net.IPv6loopback}, ExtKeyUsage: server}, x509.ExtKeyUsageServerAuth, false, false},
		{"mail", x509.Certificate{EmailAddresses: []string{"a@openai.com"}, ExtKeyUsage: server}, x509.ExtKeyUsageServerAuth, false, false},
		{"a client", x509.Certificate{DNSNames: []string{"openai.com"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}, x509.ExtKeyUsageClientAuth, false, false},
		{"code", x509.Certificate{DNSNames: []string{"openai.com"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning}}, x509.ExtKeyUsageCodeSigning, false, false},
	} {
		if err := sign(t, any, c.template, c.usage); (err == nil) != c.any {
			t.Errorf("%s, of a CA for all names: %v", c.name, err)
		}
		if err := sign(t, limited, c.template, c.usage); (err == nil) != c.ok {
			t.Errorf("%s, of a limited CA: %v", c.name, err)
		}
	}
	for _, a := range []*Authority{any, limited} {
		if c := a.cert; !c.PermittedDNSDomainsCritical || !c.MaxPathLenZero || c.MaxPathLen != 0 {
			t.Errorf("%s is not bounded", a)
		}
	}
}

func TestLeaf(t *testing.T) {
	a := newCA(t, "openai.com")
	der, key, err := a.Leaf("api.openai.com", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil || leaf.IsCA || fmt.Sprint(leaf.DNSNames) != "[api.openai.com]" || len(leaf.IPAddresses) != 0 || time.Until(leaf.NotAfter) > leafLife {
		t.Errorf("%+v, %v", leaf, err)
	}
	if _, err := x509.ParsePKCS8PrivateKey(key); err != nil {
		t.Error(err)
	}
	if _, _, err := a.Leaf("api.example.org", time.Now()); err == nil || !strings.Contains(err.Error(), "api.example.org") {
		t.Errorf("a name that it is not for: %v", err)
	}
	if _, _, err := a.Leaf("openai.com", time.Now().Add(caLife)); err == nil {
		t.Error("an expired CA signs")
	}
	long := policy.Name(strings.Repeat("a.", 40) + "openai.com")
	if _, _, err := a.Leaf(long, time.Now()); err != nil {
		t.Errorf("a long name: %v", err)
	}
	// The last leaf ends with its CA.
	der, _, err = a.Leaf("openai.com", a.NotAfter().Add(-time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	if leaf, err = x509.ParseCertificate(der); err != nil || leaf.NotAfter.After(a.NotAfter()) {
		t.Errorf("%v after %v", leaf.NotAfter, a.NotAfter())
	}
}

// TestRead: reading a written CA gives the same CA. Any other input is refused without showing
// the key.
func TestRead(t *testing.T) {
	a := newCA(t, "openai.com")
	key, err := a.PrivateKey()
	if err != nil {
		t.Fatal(err)
	}
	b, err := Read(a.Certificate(), key)
	if err != nil || b.Fingerprint() != a.Fingerprint() || fmt.Sprint(b.Names()) != "[openai.com]" {
		t.Fatalf("%v, %v", b, err)
	}
	if _, _, err := b.Leaf("openai.com", time.Now()); err != nil {
		t.Error(err)
	}
	block, _ := pem.Decode(key)
	for _, text := range []string{fmt.Sprint(a), fmt.Sprintf("%v %+v %#v %s", a, a, a, a)} {
		if !strings.Contains(text, a.Fingerprint()) || strings.Contains(text, "key") {
			t.Errorf("an authority prints as %s", text)
		}
	}
	other, err := newCA(t).PrivateKey()
	if err != nil {
		t.Fatal(err)
	}
	plain := func(change func(*x509.Certificate)) []byte {
		c := &x509.Certificate{
			SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "x"}, NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour),
			IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign, PermittedDNSDomains: []string{"a.example"}, PermittedDNSDomainsCritical: true,
		}
		change(c)
		der, err := x509.CreateCertificate(rand.Reader, c, c, a.key.Public(), a.key)
		if err != nil {
			t.Fatal(err)
		}
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	}
	if _, err := Read(plain(func(*x509.Certificate) {}), key); err != nil {
		t.Errorf("somebody's CA: %v", err)
	}
	for name, c := range map[string]struct{ certificate, key []byte }{
		"nothing":           {nil, nil},
		"no key":            {a.Certificate(), nil},
		"another key":       {a.Certificate(), other},
		"a damaged key":     {a.Certificate(), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: block.Bytes[:40]})},
		"a chain":           {append(a.Certificate(), a.Certificate()...), key},
		"a damaged one":     {pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("x")}), key},
		"a leaf":            {plain(func(c *x509.Certificate) { c.IsCA = false }), key},
		"another key usage": {plain(func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageDigitalSignature }), key},
		"no constraints":    {plain(func(c *x509.Certificate) { c.PermittedDNSDomains = nil }), key},
		"not critical":      {plain(func(c *x509.Certificate) { c.PermittedDNSDomainsCritical = false }), key},
		"addresses of IPv4 alone": {plain(func(c *x509.Certificate) {
			c.PermittedDNSDomains, c.ExcludedIPRanges = nil, []*net.IPNet{{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}}
		}), key},
	} {
		if _, err := Read(c.certificate, c.key); err == nil {
			t.Errorf("%s was accepted", name)
		} else if len(c.key) > 0 && strings.Contains(err.Error(), string(c.key[30:60])) {
			t.Errorf("%s: the error shows the key", name)
		}
	}
}
