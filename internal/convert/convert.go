// Package convert is what the packages below it share. Each of them has all
// conversions between one API and the vocabulary of package sandbox, in both
// directions: From makes the API's form of an object, To reads it. None converts
// from one API to another: that goes over the vocabulary. They are neither the
// server's nor a client's, because both use them, and whoever stands between a
// client and a node will.
//
// To checks what the form of a field demands and nothing more: what is valid is
// package sandbox's to say.
package convert

import (
	"net/netip"
	"time"

	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/sandbox"
)

// Reader reads fields one after the other, and keeps the first error.
type Reader struct{ err error }

// Err is the first error.
func (r *Reader) Err() error { return r.err }

// Fail keeps an error, unless there is one.
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

// Name reads a name that must be there.
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

// Time reads a time with a function that knows how the API writes it.
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

// Duration reads a duration with a function that knows how the API writes it.
func (r *Reader) Duration(d time.Duration, err error) time.Duration {
	if err != nil {
		r.Fail(err)
	}
	return d
}

// Policy reads a network policy of a field, whose rules are text.
func (r *Reader) Policy(field, egress string, allow, deny []string) *policy.Policy {
	p, err := sandbox.ParseNetworkPolicy(field, egress, allow, deny)
	if err != nil {
		r.Fail(err)
	}
	return p
}

// FromAddress writes an address with its port; empty is one that is not known.
func FromAddress(a netip.AddrPort) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

// Address reads what FromAddress writes.
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

// Number is a number that may be missing, in another type. What does not fit is refused by
// what is valid, in the type that is read.
func Number[To, From int | int32 | uint32](n *From) *To {
	if n == nil {
		return nil
	}
	out := To(*n)
	return &out
}
