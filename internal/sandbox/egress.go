package sandbox

import (
	"errors"
	"net/netip"
	"time"

	"agentrun.dev/internal/network/policy"
)

// Egress says where a sandbox may connect to. The zero Egress allows nothing.
type Egress struct {
	// Bounds are policies that the sandbox cannot leave: its template's, and those
	// that applied to the sandboxes that it was forked from.
	Bounds policy.Set `json:"bounds,omitempty"`
	// Own is the sandbox's own policy within Bounds. It can be replaced while the
	// sandbox runs; nil adds no rule.
	Own *policy.Policy `json:"own,omitempty"`
	// Lineage is the knowledge of a hibernated sandbox's network; nil while the
	// sandbox has a machine.
	Lineage *Lineage `json:"lineage,omitempty"`
}

// EgressOf is the Egress of a sandbox of a template, with the policy that a claim
// asks for.
func EgressOf(template, claim *policy.Policy) Egress {
	bound := policy.Policy{Egress: policy.DenyByDefault}
	if template != nil {
		bound = *template
	}
	return Egress{Bounds: policy.Set{bound}, Own: claim}
}

// Policies are all that apply, the widest first.
func (e Egress) Policies() (policy.Set, error) {
	if e.Own == nil {
		return e.Bounds, nil
	}
	set, err := policy.Narrow(e.Bounds, *e.Own)
	if err != nil {
		return nil, Invalid("networkPolicy", "%v", err)
	}
	return set, nil
}

// CheckOwn refuses a policy of a sandbox's own that allows something if its bounds
// allow nothing. Otherwise the bounds decide about each connection.
func (e Egress) CheckOwn(own *policy.Policy) error {
	if own == nil || !(policy.Set{*own}).AllowsSomething() || e.Bounds.AllowsSomething() {
		return nil
	}
	return Invalid("networkPolicy", "the template allows nothing, so a claim, a fork or a change of the policy cannot: give the template a networkPolicy that does")
}

// Narrowed is the Egress of a fork. Its bounds are the policies of its source.
// Its own policy is p, which may be nil.
func (e Egress) Narrowed(p *policy.Policy) (Egress, error) {
	bounds, err := e.Policies()
	out := Egress{Bounds: bounds, Own: p}
	return out, errors.Join(err, out.CheckOwn(p))
}

// Lineage is passed from the network of a sandbox to those that continue from
// the sandbox.
type Lineage struct {
	// Connections are those that the sandbox had. A sandbox that continues from
	// it still has their sockets, and its network tells it that they are gone.
	Connections []Connection `json:"connections,omitempty"`
	// Pins are the addresses that the sandbox got for names.
	Pins []Pin `json:"pins,omitempty"`
	// Wildcards count the names that the sandbox asked DNS for below wildcards of its
	// policies. One bound applies to it together with those that continue from it.
	Wildcards []Wildcard `json:"wildcards,omitempty"`
}

// Wildcard counts the names below a pattern that a sandbox has asked for since Began.
// Bytes is the sum of their lengths.
type Wildcard struct {
	Pattern string    `json:"pattern"`
	Began   time.Time `json:"began"`
	Names   int       `json:"names"`
	Bytes   int       `json:"bytes"`
}

// Connection is a TCP connection of a sandbox.
type Connection struct {
	Inside  netip.AddrPort `json:"inside"`
	Outside netip.AddrPort `json:"outside"`
}

// Pin is an address that a sandbox got for a name.
type Pin struct {
	Name string     `json:"name"`
	Addr netip.Addr `json:"addr"`
	// Internal says that a name server of an internal domain gave it.
	Internal bool `json:"internal,omitempty"`
}

// Traffic is one line of the log of a sandbox's network: a connection, or a refused
// attempt.
type Traffic struct {
	// Seq counts up from 1.
	Seq uint64
	// Time is when the sandbox requested the connection. Ended is when the entry
	// was written.
	Time, Ended time.Time
	// Protocol is tcp, udp or dns.
	Protocol string
	// Name is the name that the sandbox wanted to connect to, if it is known.
	Name string
	// Address is the address that the sandbox requested. Remote is the one that was
	// dialled instead, if the name has moved since.
	Address, Remote netip.AddrPort
	// Sent and Received are bytes, as the sandbox sees them.
	Sent, Received uint64
	// Rule decided, Kind is its kind, and Reason gives the reason in words.
	Rule, Kind, Reason string
	// Outcome is one of open, closed, reset by remote, reset by sandbox, refused, failed
	// or cut.
	Outcome string
	// Repeated counts further attempts that were refused in the same way.
	Repeated uint64
}

// TrafficRequest asks for the log of a sandbox's network from an entry on. The first
// entry is 1, and 0 means the same. The answer has at most Max entries. While there are
// no entries, the answer waits for at most Wait.
type TrafficRequest struct {
	Key
	From uint64
	Max  int
	Wait time.Duration
	// Open asks for the open connections, too.
	Open bool
}

// Bounds of a TrafficRequest.
const (
	DefaultTraffic = 100 // entries, where Max is 0
	MaxTraffic     = 1000
	MaxTrafficWait = 30 * time.Second
)

// Validate refuses a request that is out of bounds.
func (r TrafficRequest) Validate() error {
	if r.Max < 0 || r.Max > MaxTraffic {
		return Invalid("limit", "%d is not between 1 and %d", r.Max, MaxTraffic)
	}
	if r.Wait < 0 || r.Wait > MaxTrafficWait {
		return Invalid("wait", "%v is not between 0 and %v", r.Wait, MaxTrafficWait)
	}
	return nil
}

// TrafficPage is a part of the log.
type TrafficPage struct {
	Entries []Traffic
	// Next is where the next request begins. Lost counts the entries that were
	// dropped before they were read.
	Next, Lost uint64
	// Open are the connections that are still open, the oldest first. They have
	// no number yet.
	Open []Traffic
}
