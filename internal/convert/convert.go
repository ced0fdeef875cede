// Package convert is shared by the packages below it. Each of those converts
// between one API and the vocabulary of package sandbox, in both directions:
// From makes the API's form of an object, To reads it. To get from one API to
// another, convert to the vocabulary and from there. These packages belong
// neither to the server nor to a client, because both use them, and a program
// between a client and a node will, too.
//
// To checks only the form of a field. Package sandbox decides which values are
// valid.
package convert

import (
	"net/netip"
	"time"

	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/sandbox"
)

// Reader reads one field after another, and keeps the first error.
type Reader struct{ err error }

// Err is the first error.
func (r *Reader) Err() error { return r.err }

// Fail keeps an error, unless there was one before.
func (r *Reader) Fail(err error) {
	if r.err == nil {
		r.err = err
	}
}

// Key reads a namespace and a name.
func (r *Reader) Key(namespace, name string) sandbox.Key {
	return sandbox.Key{Namespace: r.Namespace(namespace), Name: r.Name(name)}
}

// Namespace reads a namespace.
func (r *Reader) Namespace(s string) sandbox.Namespace { return read(r, s, sandbox.ParseNamespace) }

// Name reads a required name.
func (r *Reader) Name(s string) sandbox.Name { return read(r, s, sandbox.ParseName) }

// OptionalName reads a name that may be empty.
func (r *Reader) OptionalName(s string) sandbox.Name {
	if s == "" {
		return ""
	}
	return r.Name(s)
}

// RegistryHost reads a registry's host.
func (r *Reader) RegistryHost(s string) sandbox.RegistryHost {
	return read(r, s, sandbox.ParseRegistryHost)
}

// ID reads an id that must be there.
func (r *Reader) ID(s string) sandbox.ID { return read(r, s, sandbox.ParseID) }

// OptionalID reads an id that may be empty.
func (r *Reader) OptionalID(s string) sandbox.ID {
	if s == "" {
		return ""
	}
	return r.ID(s)
}

// OptionalUID reads the UID of an owner, which may be empty.
func (r *Reader) OptionalUID(s string) sandbox.UID {
	if s == "" {
		return ""
	}
	return read(r, s, sandbox.ParseUID)
}

// OptionalTokenHash reads the hash of a token, which may be empty.
func (r *Reader) OptionalTokenHash(s string) sandbox.TokenHash {
	if s == "" {
		return ""
	}
	return read(r, s, sandbox.ParseTokenHash)
}

// Time takes the result of a function that reads times in the API's format, and
// keeps its error.
func (r *Reader) Time(t time.Time, err error) time.Time {
	if err != nil {
		r.Fail(err)
	}
	return t
}

// Size reads a number that is not negative.
func (r *Reader) Size(field string, n int64) uint64 {
	if n < 0 {
		r.Fail(sandbox.Invalid(field, "%d is negative", n))
		return 0
	}
	return uint64(n)
}

// Duration takes the result of a function that reads durations in the API's
// format, and keeps its error.
func (r *Reader) Duration(d time.Duration, err error) time.Duration {
	if err != nil {
		r.Fail(err)
	}
	return d
}

// Policy reads a field with a network policy, whose rules are text.
func (r *Reader) Policy(field, egress string, allow, deny []string) *policy.Policy {
	p, err := sandbox.ParseNetworkPolicy(field, egress, allow, deny)
	if err != nil {
		r.Fail(err)
	}
	return p
}

// FromAddress formats an address with its port; an unknown address becomes "".
func FromAddress(a netip.AddrPort) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

// Address reads the format of FromAddress.
func (r *Reader) Address(field, s string) netip.AddrPort {
	if s == "" {
		return netip.AddrPort{}
	}
	a, err := netip.ParseAddrPort(s)
	if err != nil {
		r.Fail(sandbox.Invalid(field, "%s is not an address with a port", sandbox.Quote(s)))
	}
	return a
}

func read[T any](r *Reader, s string, parse func(string) (T, error)) T {
	v, err := parse(s)
	if err != nil {
		r.Fail(err)
	}
	return v
}

// Number converts an optional number to another type. It does not check the range: package
// sandbox validates the number that was read.
func Number[To, From int | int32 | uint32](n *From) *To {
	if n == nil {
		return nil
	}
	out := To(*n)
	return &out
}
