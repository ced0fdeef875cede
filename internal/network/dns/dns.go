// Package dns is the resolver that sandboxes speak to. It parses their questions,
// asks the configured upstreams, keeps a cache that the sandboxes of one process
// share, and bounds the questions of each sandbox. It has no policy of its own: an
// Asker decides which names a sandbox may resolve, and learns the addresses before
// the sandbox does.
//
// No message of an upstream or a sandbox is passed on. Every message, in both
// directions, is parsed and built anew from the few supported record types:
//
//	question                      answer
//	A, AAAA of an allowed name    the addresses, with the aliases (CNAME) that led to them
//	other types, allowed name     NOERROR without data, without asking an upstream: HTTPS and
//	                              SVCB would carry keys for ECH, TXT and NULL would carry data
//	ANY, zone transfers           REFUSED
//	a name that is not allowed    REFUSED
//	a class other than IN         REFUSED
//	an opcode other than QUERY    NOTIMP
//	not exactly one question      FORMERR
//
// Names are taken as they stand: there are no search domains.
package dns

import (
	"errors"
	"net/netip"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// Bounds on the work that an upstream can cause.
const (
	maxAliases   = 16  // aliases between a name and its addresses
	maxAddresses = 64  // addresses kept of one answer; further ones are dropped
	maxRecords   = 512 // records of one answer that are read

	// udpSize is the size of datagrams that pass every path unfragmented (dnsflagday.net).
	udpSize = 1232
	// maxQuery bounds a sandbox's message: a question with EDNS options is far smaller.
	maxQuery = 1024
)

// Bounds on how long answers are kept, whatever their TTL.
const (
	minTTL         = 5 * time.Second
	maxTTL         = time.Hour
	maxNegativeTTL = 5 * time.Minute
	failureTTL     = time.Second // RFC 9520: failures are kept, too
)

// Family selects A or AAAA records.
type Family bool

// The families of addresses.
const (
	IPv4 Family = false
	IPv6 Family = true
)

func (f Family) recordType() dnsmessage.Type {
	if f == IPv6 {
		return dnsmessage.TypeAAAA
	}
	return dnsmessage.TypeA
}

// Answer is the answer of the upstreams about the addresses of one name.
type Answer struct {
	// Aliases are the names from the name asked for, without it, to the owner of
	// Addrs.
	Aliases []string
	Addrs   []netip.Addr
	// NotFound is set if the name does not exist. It is not set for a name without
	// addresses.
	NotFound bool
	// Internal is set if the name and all its aliases are below internal domains. The
	// addresses then come from the upstreams that an administrator has named for
	// them.
	Internal bool
	// Expires is when the question has to be asked again.
	Expires time.Time
}

// Asker is the sandbox for which names are resolved.
type Asker interface {
	// MayResolve decides about a name before any upstream learns of it.
	MayResolve(name string) Verdict
	// MayAlias decides whether alias may be an alias of a name that MayResolve has
	// allowed.
	MayAlias(name, alias string) bool
	// Resolved learns an answer before the sandbox does. It returns the addresses
	// that the sandbox gets, and why it keeps others back. If it returns no
	// addresses, the question is refused.
	Resolved(name string, answer Answer) (addrs []netip.Addr, kept string)
	// Refused is called for each refused question, with the reason. The detail is
	// empty, the alias that was not allowed, the problem with the aliases, or the
	// second result of Resolved.
	Refused(name string, reason Reason, detail string)
}

// Verdict says whether a name may be resolved.
type Verdict struct {
	Allowed bool
	// Wildcard is the pattern that allowed the name, if the pattern allows other
	// names, too. The number of names that a sandbox may ask for below one pattern is
	// bounded (Limits).
	Wildcard string
}

// Reason is why a question was refused.
type Reason string

// The reasons for refused questions.
const (
	ReasonPolicy    Reason = "name not allowed"
	ReasonAlias     Reason = "alias not allowed"
	ReasonType      Reason = "record type not served"
	ReasonClass     Reason = "class not served"
	ReasonRate      Reason = "too many DNS queries"
	ReasonPending   Reason = "too many DNS queries at one time"
	ReasonWildcard  Reason = "too many names below one wildcard"
	ReasonName      Reason = "not a valid host name"
	ReasonAddresses Reason = "only closed addresses"
)

// Errors of lookups. A sandbox sees ErrAlias and ErrFailed as SERVFAIL.
var (
	ErrAlias  = errors.New("aliases loop, are too many, or lead into an internal domain")
	ErrFailed = errors.New("no DNS upstream answered")
	ErrName   = errors.New("not a valid host name")
	ErrLimit  = errors.New("the sandbox asks too many DNS questions")
)
