// Package authority makes certificate authorities for namespaces, and the certificates of
// hosts that they sign. Only the sandboxes of one namespace trust a CA. It signs for hosts
// whose requests get credentials put in. docs/design/injection.md describes all of it.
package authority

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"strings"
	"time"

	"agentrun.dev/internal/network/policy"
)

// The validity of certificates. It begins a day in the past, because clocks
// differ.
const (
	caLife   = 10 * 365 * 24 * time.Hour
	leafLife = 90 * 24 * time.Hour
	early    = 24 * time.Hour
)

// MaxNames is how many names a CA can be limited to.
const MaxNames = 64

// reserved is a name that no host can have (RFC 6761). A list of permitted names of some kind
// that has only this one permits no name of that kind.
const reserved = "invalid"

// Authority is a CA with its key. Formatting it never shows the key.
type Authority struct {
	cert *x509.Certificate
	key  crypto.Signer
}

// String shows nothing of the key.
func (a *Authority) String() string { return "Authority(" + a.Fingerprint() + ")" }

// GoString is the output of %#v.
func (a *Authority) GoString() string { return a.String() }

// LogValue is the value in a log.
func (a *Authority) LogValue() slog.Value { return slog.StringValue(a.String()) }

// New makes a CA for a namespace. Clients accept it only for names and for hosts below
// them; without names, for all hosts.
func New(namespace string, names []policy.Name, now time.Time) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a CA: %w", err)
	}
	serial, err := newSerial()
	if err != nil {
		return nil, fmt.Errorf("make a CA: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		// Each CA has a name of its own, because trust stores look CAs up by
		// name.
		Subject: pkix.Name{
			Organization: []string{"AgentRun"}, OrganizationalUnit: []string{namespace}, CommonName: fmt.Sprintf("AgentRun CA %x", serial.Bytes()[:4]),
		},
		NotBefore: now.Add(-early), NotAfter: now.Add(caLife),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		PermittedDNSDomainsCritical: true,
		PermittedEmailAddresses:     []string{reserved}, PermittedURIDomains: []string{reserved},
		ExcludedIPRanges: []*net.IPNet{
			{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)},
			{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)},
		},
	}
	for _, n := range names {
		template.PermittedDNSDomains = append(template.PermittedDNSDomains, string(n))
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make a CA: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("make a CA: %w", err)
	}
	return &Authority{cert: cert, key: key}, nil
}

func newSerial() (*big.Int, error) {
	b := make([]byte, 16) // RFC 5280 §4.1.2.2: positive, at most 20 bytes
	if _, err := rand.Read(b); err != nil {
		return nil, err
	}
	b[0] = b[0]&0x7f | 0x40
	return new(big.Int).SetBytes(b), nil
}

// Read reads a CA from elsewhere, from its certificate and its key in PEM. Its errors show
// nothing of the key.
func Read(certificate, key []byte) (*Authority, error) {
	cert, err := readCertificate(certificate)
	if err != nil {
		return nil, err
	}
	block, rest := pem.Decode(key)
	if block == nil || len(strings.TrimSpace(string(rest))) > 0 {
		return nil, errors.New("the key is not one block of PEM")
	}
	signer := parseKey(block.Bytes)
	if signer == nil {
		return nil, errors.New("the key is none that can sign: it is ECDSA, RSA or Ed25519, as PKCS #8, SEC 1 or PKCS #1, and not encrypted")
	}
	if public, ok := signer.Public().(interface{ Equal(crypto.PublicKey) bool }); !ok || !public.Equal(cert.PublicKey) {
		return nil, errors.New("the key is not that of the certificate")
	}
	return &Authority{cert: cert, key: signer}, nil
}

func readCertificate(text []byte) (*x509.Certificate, error) {
	block, rest := pem.Decode(text)
	if block == nil || block.Type != "CERTIFICATE" || len(strings.TrimSpace(string(rest))) > 0 {
		return nil, errors.New("the certificate is not one block of PEM: a CA is set without others that have signed it")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	switch {
	case err != nil:
		return nil, fmt.Errorf("the certificate: %w", err)
	case !cert.IsCA || !cert.BasicConstraintsValid || cert.KeyUsage&x509.KeyUsageCertSign == 0:
		return nil, errors.New("the certificate is not that of a CA: it needs basicConstraints CA:TRUE and the key usage keyCertSign")
	case !constrained(cert):
		return nil, errors.New("the CA has no critical name constraints that exclude IP addresses or permit certain DNS names: sandboxes would trust it for everything")
	}
	return cert, nil
}

// constrained reports whether clients accept a CA for some names only. RFC 5280 §4.2.1.10
// wants the extension to be critical: clients that do not know it then refuse the CA.
func constrained(c *x509.Certificate) bool {
	if !c.PermittedDNSDomainsCritical {
		return false
	}
	if len(c.PermittedDNSDomains) > 0 {
		return true
	}
	four, six := false, false
	for _, r := range c.ExcludedIPRanges {
		ones, bits := r.Mask.Size()
		four, six = four || ones == 0 && bits == 32, six || ones == 0 && bits == 128
	}
	return four && six
}

func parseKey(der []byte) crypto.Signer {
	if key, err := x509.ParsePKCS8PrivateKey(der); err == nil {
		signer, _ := key.(crypto.Signer)
		return signer
	}
	if key, err := x509.ParseECPrivateKey(der); err == nil {
		return key
	}
	if key, err := x509.ParsePKCS1PrivateKey(der); err == nil {
		return key
	}
	return nil
}

// Certificate is the CA's certificate in PEM, which is public.
func (a *Authority) Certificate() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
}

// PrivateKey is the CA's key in PEM. It is only for sealing.
func (a *Authority) PrivateKey() ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(a.key)
	if err != nil {
		return nil, errors.New("the key of a CA cannot be written")
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// Fingerprint is the SHA-256 of the certificate.
func (a *Authority) Fingerprint() string {
	sum := sha256.Sum256(a.cert.Raw)
	return hex.EncodeToString(sum[:])
}

// Names are the DNS names that the CA is limited to, including hosts below them. An empty
// list permits all names.
func (a *Authority) Names() []string { return a.cert.PermittedDNSDomains }

// Subject is the CA's name, for people.
func (a *Authority) Subject() string { return a.cert.Subject.String() }

// NotAfter is when the CA's certificate expires.
func (a *Authority) NotAfter() time.Time { return a.cert.NotAfter }

// Leaf makes a certificate for one host, with its key (PKCS #8), both DER.
func (a *Authority) Leaf(host policy.Name, now time.Time) (certificate, key []byte, err error) {
	fail := func(err error) ([]byte, []byte, error) {
		return nil, nil, fmt.Errorf("sign a certificate for %s by %s: %w", host, a.Subject(), err)
	}
	pair, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fail(err)
	}
	serial, err := newSerial()
	if err != nil {
		return fail(err)
	}
	end := now.Add(leafLife)
	if end.After(a.cert.NotAfter) {
		end = a.cert.NotAfter
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: commonName(host)}, DNSNames: []string{string(host)},
		NotBefore: now.Add(-early), NotAfter: end,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, BasicConstraintsValid: true,
	}
	if certificate, err = x509.CreateCertificate(rand.Reader, template, a.cert, pair.Public(), a.key); err != nil {
		return fail(err)
	}
	if err := a.check(certificate, host, now); err != nil {
		return fail(err)
	}
	if key, err = x509.MarshalPKCS8PrivateKey(pair); err != nil {
		return fail(err)
	}
	return certificate, key, nil
}

// commonName is the host, or a fixed name if the host is too long for a common name
// (RFC 5280, 64).
func commonName(host policy.Name) string {
	if len(host) > 64 {
		return "AgentRun"
	}
	return string(host)
}

// check verifies a certificate as clients do, including name constraints and
// expiry.
func (a *Authority) check(der []byte, host policy.Name, now time.Time) error {
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AddCert(a.cert)
	_, err = leaf.Verify(x509.VerifyOptions{DNSName: string(host), Roots: roots, CurrentTime: now})
	return err
}
