// Package inject is about credentials that a sandbox uses and never holds: which values
// belong into which headers of requests to which host, and the decision about the headers of
// one request. docs/design/injection.md has the whole.
package inject

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"agentrun.dev/internal/network/policy"
)

// Value is that of a secret. Formatting it never shows it.
type Value string

// String tells nothing of the value.
func (Value) String() string { return "Value(…)" }

// GoString is what %#v prints.
func (v Value) GoString() string { return v.String() }

// LogValue is what a log gets.
func (v Value) LogValue() slog.Value { return slog.StringValue(v.String()) }

// MarshalJSON refuses: values cross the control socket and nothing else.
func (Value) MarshalJSON() ([]byte, error) {
	return nil, errors.New("the value of a secret is not written as JSON")
}

// Host is one whose requests get credentials.
type Host struct {
	Name policy.Name
	// Certificate (DER) is what the sandbox is shown instead of the host's own, and Key
	// (PKCS #8) is the leaf's own key.
	Certificate []byte
	Key         Value
	// Problem says why there is no certificate: then connections to the host are refused.
	Problem     string
	Credentials []Credential
}

// Credential is a value that belongs into a header of requests to a host.
type Credential struct {
	// Secret says which it is, for people: SECRET/KEY.
	Secret string
	Header string
	// Format is the header's value, with {} where Placeholder is inside of the sandbox
	// and Value outside.
	Format      string
	Placeholder string
	Value       Value
	// Problem says why there is no value: then requests that ask for it are refused.
	Problem string
}

// Slot is where a format has the value.
const Slot = "{}"

// form is the header with some value.
func (c Credential) form(value string) string { return strings.Replace(c.Format, Slot, value, 1) }

// Set is the hosts of one sandbox, by name. One that was prepared does not change.
type Set map[policy.Name]*Prepared

// Prepared is a Host that is ready to be used.
type Prepared struct {
	Host
	// Leaf is made of Certificate and Key; it is empty if there is a Problem.
	Leaf tls.Certificate
}

// Prepare reads what hosts carry.
func Prepare(hosts []Host) (Set, error) {
	set := make(Set, len(hosts))
	for _, h := range hosts {
		if name, err := policy.ParseName(string(h.Name)); err != nil || name != h.Name {
			return nil, fmt.Errorf("%.80q is no name of a host", string(h.Name))
		}
		if set[h.Name] != nil {
			return nil, fmt.Errorf("host %s is there twice", h.Name)
		}
		p := &Prepared{Host: h}
		if h.Problem == "" {
			key, err := x509.ParsePKCS8PrivateKey([]byte(h.Key))
			if err != nil {
				return nil, fmt.Errorf("the key of the certificate for %s cannot be read", h.Name) // the error may show a part
			}
			signer, ok := key.(crypto.Signer)
			leaf, err := x509.ParseCertificate(h.Certificate)
			if err == nil && (!ok || leaf.IsCA) {
				err = errors.New("it is not that of a server")
			}
			if err == nil {
				err = leaf.VerifyHostname(string(h.Name))
			}
			if err != nil {
				return nil, fmt.Errorf("the certificate for %s: %w", h.Name, err)
			}
			p.Leaf = tls.Certificate{Certificate: [][]byte{h.Certificate}, PrivateKey: signer, Leaf: leaf}
		}
		set[h.Name] = p
	}
	return set, nil
}
