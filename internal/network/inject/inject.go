// Package inject handles credentials that a sandbox uses without holding them. It
// knows which values belong into which headers of requests to which host, and decides
// about the headers of each request. docs/design/injection.md describes the whole.
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

// Value is the value of a secret. Formatting it never shows it.
type Value string

// String shows nothing of the value.
func (Value) String() string { return "Value(…)" }

// GoString is what %#v prints.
func (v Value) GoString() string { return v.String() }

// LogValue is the form for logs.
func (v Value) LogValue() slog.Value { return slog.StringValue(v.String()) }

// MarshalJSON refuses, because values cross only the control socket.
func (Value) MarshalJSON() ([]byte, error) {
	return nil, errors.New("the value of a secret is not written as JSON")
}

// Host is a host whose requests get credentials.
type Host struct {
	Name policy.Name
	// Certificate (DER) is shown to the sandbox instead of the host's own. Key (PKCS
	// #8) is the leaf's own key.
	Certificate []byte
	Key         Value
	// Problem says why the certificate is missing. Connections to the host are then
	// refused.
	Problem     string
	Credentials []Credential
}

// Credential is a value that belongs into a header of requests to a host.
type Credential struct {
	// Secret names the secret for people: SECRET/KEY.
	Secret string
	Header string
	// Format is the header's value. Its {} stands for Placeholder inside the sandbox,
	// and for Value outside.
	Format      string
	Placeholder string
	Value       Value
	// Problem says why the value is missing. Requests that ask for it are then
	// refused.
	Problem string
}

// Slot is the place of the value in a Format.
const Slot = "{}"

// form is the header's value with this value in the slot.
func (c Credential) form(value string) string { return strings.Replace(c.Format, Slot, value, 1) }

// Set holds the hosts of one sandbox, by name. A prepared Set does not change.
type Set map[policy.Name]*Prepared

// Prepared is a Host that is ready to be used.
type Prepared struct {
	Host
	// Leaf is made from Certificate and Key. It is empty if there is a Problem.
	Leaf tls.Certificate
}

// Prepare parses the certificates of hosts.
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
				return nil, fmt.Errorf("the key of the certificate for %s cannot be read", h.Name) // the error might show a part of the key
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
