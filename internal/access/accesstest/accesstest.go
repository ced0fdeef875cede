// Package accesstest makes certificates, good and bad ones, for tests.
package accesstest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"path/filepath"
	"testing"
	"time"

	"agentrun.dev/internal/durable"
)

// CA signs certificates.
type CA struct {
	t    testing.TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewCA makes a CA.
func NewCA(t testing.TB) *CA {
	t.Helper()
	ca := &CA{t: t, key: newKey(t)}
	ca.cert = sign(t, &x509.Certificate{
		Subject: pkix.Name{CommonName: "CA of " + t.Name()}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
		NotBefore: time.Now().Add(-24 * time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}, nil, ca.key, ca.key)
	return ca
}

// PEM is the certificate of the CA.
func (ca *CA) PEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.cert.Raw})
}

// Pool contains only this CA.
func (ca *CA) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(ca.cert)
	return pool
}

// Spec describes a certificate. By default it is valid for both ends, at the loopback,
// from an hour ago for another hour.
type Spec struct {
	URIs        []string
	Uses        []x509.ExtKeyUsage
	From, Until time.Time
	// NoUse leaves the extended key usage out.
	NoUse bool
	// By signs it instead of the CA: a certificate from Issue, used as if it
	// were a CA's.
	By *tls.Certificate
}

// Issue makes a certificate.
func (ca *CA) Issue(s Spec) tls.Certificate {
	ca.t.Helper()
	c := &x509.Certificate{
		Subject:   pkix.Name{CommonName: "test"},
		NotBefore: s.From, NotAfter: s.Until, ExtKeyUsage: s.Uses, KeyUsage: x509.KeyUsageDigitalSignature,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost"},
	}
	if s.From.IsZero() {
		c.NotBefore = time.Now().Add(-time.Hour)
	}
	if s.Until.IsZero() {
		c.NotAfter = time.Now().Add(time.Hour)
	}
	if len(s.Uses) == 0 && !s.NoUse {
		c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}
	}
	for _, u := range s.URIs {
		uri, err := url.Parse(u)
		if err != nil {
			ca.t.Fatal(err)
		}
		c.URIs = append(c.URIs, uri)
	}
	key := newKey(ca.t)
	out := tls.Certificate{PrivateKey: key}
	if s.By == nil {
		out.Leaf = sign(ca.t, c, ca.cert, key, ca.key)
		out.Certificate = [][]byte{out.Leaf.Raw}
		return out
	}
	out.Leaf = sign(ca.t, c, s.By.Leaf, key, s.By.PrivateKey.(*ecdsa.PrivateKey))
	out.Certificate = append([][]byte{out.Leaf.Raw}, s.By.Certificate...)
	return out
}

// Component makes the certificate of a component, ROLE/NAME.
func (ca *CA) Component(name string) tls.Certificate {
	ca.t.Helper()
	return ca.Issue(Spec{URIs: []string{"spiffe://agentrun.dev/" + name}})
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func sign(t testing.TB, c, parent *x509.Certificate, key, signer *ecdsa.PrivateKey) *x509.Certificate {
	t.Helper()
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		t.Fatal(err)
	}
	c.SerialNumber = serial
	if parent == nil {
		parent = c
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// Files are the files of one end of mutual TLS, in a folder.
type Files struct{ Cert, Key, CA string }

// NewFiles names files in a new folder.
func NewFiles(t testing.TB) Files {
	dir := t.TempDir()
	return Files{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key"), CA: filepath.Join(dir, "ca.crt")}
}

// WritePair replaces the certificate and its key, each by a rename.
func (f Files) WritePair(t testing.TB, pair tls.Certificate) {
	t.Helper()
	private, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	var chain []byte
	for _, der := range pair.Certificate {
		chain = append(chain, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})...)
	}
	Replace(t, f.Key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}))
	Replace(t, f.Cert, chain)
}

// WriteCAs replaces the file of CAs.
func (f Files) WriteCAs(t testing.TB, cas ...*CA) {
	t.Helper()
	var text []byte
	for _, ca := range cas {
		text = append(text, ca.PEM()...)
	}
	Replace(t, f.CA, text)
}

// Replace writes a file so that no reader sees it in part.
func Replace(t testing.TB, path string, text []byte) {
	t.Helper()
	if err := durable.ReplaceVolatile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
}
