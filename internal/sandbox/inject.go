package sandbox

import (
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"net/textproto"
	"slices"
	"strings"
	"time"

	"agentrun.dev/internal/network/policy"
)

// Inject says that a value never enters a sandbox. It is put into a header of the sandbox's
// requests to one host, on their way out.
type Inject struct {
	// Host is a DNS name; requests go to its port 443.
	Host   string `json:"host"`
	Header string `json:"header"`
	// Format is the header with {} for the value; empty is {}.
	Format string `json:"format,omitempty"`
}

// injectSlot is the place of the value in a format.
const injectSlot = "{}"

// Bounds of an Inject.
const (
	maxInjectHeader = 128
	maxInjectFormat = 256
)

// reservedHeaders are those that HTTP itself needs, or that proxies remove.
var reservedHeaders = []string{
	"Connection", "Content-Length", "Expect", "Host", "Http2-Settings", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization",
	"Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

// HostName returns the host in the form that policies use.
func (i Inject) HostName() (policy.Name, error) { return policy.ParseName(i.Host) }

// FormatOrSlot returns the format, or its default.
func (i Inject) FormatOrSlot() string {
	if i.Format == "" {
		return injectSlot
	}
	return i.Format
}

// Validate refuses an Inject that no request can carry.
func (i *Inject) Validate() error {
	if i == nil {
		return nil
	}
	if _, err := i.HostName(); err != nil {
		return Invalid("secrets.inject.host", "%v", err)
	}
	if len(i.Header) == 0 || len(i.Header) > maxInjectHeader || strings.ContainsFunc(i.Header, notToken) {
		return Invalid("secrets.inject.header", "%s is not the name of a header", Quote(i.Header))
	}
	if slices.Contains(reservedHeaders, textproto.CanonicalMIMEHeaderKey(i.Header)) {
		return Invalid("secrets.inject.header", "%s belongs to HTTP itself: no value is put into it", i.Header)
	}
	f := i.FormatOrSlot()
	if strings.Count(f, injectSlot) != 1 || len(f) > maxInjectFormat || strings.TrimSpace(f) != f || strings.ContainsFunc(f, notPrintable) {
		return Invalid("secrets.inject.format", "%s is not printable ASCII of at most %d characters with one {} for the value", Quote(f), maxInjectFormat)
	}
	return nil
}

// notToken is true for characters that a header's name cannot have here. RFC 9110 §5.6.2 allows
// more of them, but servers that follow CGI cannot tell _ from -.
func notToken(r rune) bool {
	return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-'
}

func notPrintable(r rune) bool { return r < ' ' || r > '~' }

// Placeholder is the text that a sandbox has in place of an injected value. It is
// not secret. The name of a secret never has a dot.
func (r SecretRef) Placeholder() string {
	return "agentrun-injected." + string(r.Secret) + "." + r.Key
}

// Injects reports whether values are put into requests of a sandbox with these
// references.
func Injects(refs []SecretRef) bool {
	return slices.ContainsFunc(refs, func(r SecretRef) bool { return r.Inject != nil })
}

// NamespaceCA is the public part of the CA that a namespace's sandboxes trust. In requests
// to hosts that get values put in, the sandboxes see certificates of this CA in place of
// the hosts'.
type NamespaceCA struct {
	Namespace Namespace
	// Certificate is in PEM, Fingerprint its SHA-256, Subject its name.
	Certificate, Fingerprint, Subject string
	// Names are the DNS names that the CA is limited to, with all names below them; empty
	// is no limit.
	Names   []string
	Created time.Time
	Expires time.Time
}

// CAKey is the key of a CA in PEM. Formatting it never shows it.
type CAKey string

// String never shows the key.
func (CAKey) String() string { return "CAKey(…)" }

// GoString serves %#v.
func (k CAKey) GoString() string { return k.String() }

// LogValue serves logs.
func (k CAKey) LogValue() slog.Value { return slog.StringValue(k.String()) }

// CASpec asks for another CA of a namespace: a new one that is limited to Names, or the given
// one.
type CASpec struct {
	Names       []string
	Certificate string
	Key         CAKey
}

// MaxCANames is the greatest number of names that a CA can be limited to.
const MaxCANames = 64

// Validate refuses a certificate without a key, a key without a certificate,
// and names beside a certificate.
func (s CASpec) Validate() error {
	if (s.Certificate == "") != (s.Key == "") {
		return Invalid("certificate", "a CA is set with its certificate and its key; one of them is missing")
	}
	if s.Certificate != "" && len(s.Names) > 0 {
		return Invalid("names", "a CA that is given says in its own certificate which names it is limited to: leave them out")
	}
	if len(s.Names) > MaxCANames {
		return Invalid("names", "%d are more than %d", len(s.Names), MaxCANames)
	}
	for _, n := range s.Names {
		if _, err := policy.ParseName(n); err != nil {
			return Invalid("names", "%v", err)
		}
	}
	return nil
}

// RevisionWith is the revision of a spec whose snapshot contains a CA and is made of the image
// with a digest. Either may be empty.
func (s TemplateSpec) RevisionWith(fingerprint, image string) string {
	if fingerprint == "" && image == "" {
		return s.Digest()
	}
	sum := sha256.Sum256([]byte(s.Digest() + fingerprint + image))
	return hex.EncodeToString(sum[:8])
}
