// Package dns is the resolver that sandboxes speak to: it parses their questions, asks the
// configured upstreams, keeps a cache that the sandboxes of one process share, and bounds
// what each sandbox may ask. It has no policy of its own: an Asker decides which names a
// sandbox may resolve, and learns the addresses before the sandbox does.
//
// Nothing that an upstream or a sandbox sent is passed on. Every message, in both
// directions, is parsed and built anew from the few record types that are understood:
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

// Bounds on what an upstream can make the resolver do.
const (
	maxAliases   = 16  // aliases between a name and its addresses
	maxAddresses = 64  // addresses kept of one answer; further ones are dropped
	maxRecords   = 512 // records of one answer that are looked at

	// udpSize is the size of datagrams that pass every path unfragmented (dnsflagday.net).
	udpSize = 1232
	// maxQuery bounds a sandbox's message: a question with EDNS options is far smaller.
	maxQuery = 1024
)

// Bounds on how long answers are kept, whatever their TTL says.
const (
	minTTL         = 5 * time.Second
	maxTTL         = time.Hour
	maxNegativeTTL = 5 * time.Minute
	failureTTL     = time.Second // RFC 9520: failures are remembered too
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

// Answer is what the upstreams say about the addresses of one name.
type Answer struct {
	// Aliases leads from the asked name to the owner of Addrs, without the asked name.
	Aliases []string
	Addrs   []netip.Addr
	// NotFound is set if the name does not exist, in contrast to one without addresses.
	NotFound bool
	// Internal is set if the name and all its aliases are below internal domains, so that
	// the addresses are the word of upstreams an administrator has named for them.
	Internal bool
	// Expires is when the answer is to be asked for again.
	Expires time.Time
}

// Asker is the sandbox on whose behalf names are resolved.
type Asker interface {
	// MayResolve decides about a name before any upstream hears of it.
	MayResolve(name string) Verdict
	// MayAlias decides whether a name that MayResolve has allowed may lead to an alias.
	MayAlias(name, alias string) bool
	// Resolved learns an answer before the sandbox does. It returns the addresses that the
	// sandbox is told, and why others are kept back; without any, the question is refused.
	Resolved(name string, answer Answer) (addrs []netip.Addr, kept string)
	// Refused is told of each question that was refused, with the reason. The detail is
	// empty, the alias that was not allowed, what is wrong with aliases, or what Resolved said.
	Refused(name string, reason Reason, detail string)
}

// Verdict says whether a name may be resolved.
type Verdict struct {
	Allowed bool
	// Wildcard is the pattern that allowed the name, if it allows others too. The number of
	// names that a sandbox asks for below one pattern is bounded (Limits).
	Wildcard string
}

// Reason says why a question was refused.
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

// Errors of lookups. ErrAlias and ErrFailed are what a sandbox sees as SERVFAIL.
var (
	ErrAlias  = errors.New("aliases loop, are too many, or lead into an internal domain")
	ErrFailed = errors.New("no DNS upstream answered")
	ErrName   = errors.New("not a valid host name")
	ErrLimit  = errors.New("the sandbox asks too many DNS questions")
)
