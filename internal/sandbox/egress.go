package sandbox

import (
	"errors"
	"net/netip"
	"time"

	"agentrun.dev/internal/network/policy"
)

// Egress is what a sandbox may connect to. The zero Egress allows nothing.
type Egress struct {
	// Bounds are policies that the sandbox cannot leave: its template's, and those
	// that held for the sandboxes that it was forked from.
	Bounds policy.Set `json:"bounds,omitempty"`
	// Own is the sandbox's own policy within these, which can be replaced while it
	// runs; nil adds nothing to them.
	Own *policy.Policy `json:"own,omitempty"`
	// Lineage is what the network of a hibernated sandbox knew; nil while it has a
	// machine.
	Lineage *Lineage `json:"lineage,omitempty"`
}

// EgressOf is that of a sandbox of a template, with the policy that a claim asks for.
func EgressOf(template, claim *policy.Policy) Egress {
	bound := policy.Policy{Egress: policy.DenyByDefault}
	if template != nil {
		bound = *template
	}
	return Egress{Bounds: policy.Set{bound}, Own: claim}
}

// Policies are all that hold, the widest first.
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

// CheckOwn refuses a policy of a sandbox's own that asks for something where its bounds
// allow nothing at all. Elsewhere the bounds decide about each connection.
func (e Egress) CheckOwn(own *policy.Policy) error {
	if own == nil || !(policy.Set{*own}).AllowsSomething() || e.Bounds.AllowsSomething() {
		return nil
	}
	return Invalid("networkPolicy", "the template allows nothing, so a claim, a fork or a change of the policy cannot: give the template a networkPolicy that does")
}

// Narrowed is that of a fork: what holds for its source bounds it, and p if it is
// not nil.
func (e Egress) Narrowed(p *policy.Policy) (Egress, error) {
	bounds, err := e.Policies()
	out := Egress{Bounds: bounds, Own: p}
	return out, errors.Join(err, out.CheckOwn(p))
}

// Lineage is what the network of a sandbox hands to those that continue from it.
type Lineage struct {
	// Connections are those that the sandbox had. Whoever continues from it still
	// has their sockets, and is told that they are gone.
	Connections []Connection `json:"connections,omitempty"`
	// Pins are the names that the sandbox got addresses for.
	Pins []Pin `json:"pins,omitempty"`
	// Wildcards are what the sandbox asked DNS for below wildcards of its policies, which
	// is bounded for it together with those that continue from it.
	Wildcards []Wildcard `json:"wildcards,omitempty"`
}

// Wildcard is how many names below a pattern a sandbox asked for since Began, and the sum
// of their lengths.
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

// Traffic is one line of the log of a sandbox's network: a connection, or one that was
// refused.
type Traffic struct {
	// Seq counts up from 1.
	Seq uint64
	// Time is when the connection was asked for, Ended when the entry was written.
	Time, Ended time.Time
	// Protocol is tcp, udp or dns.
	Protocol string
	// Name is what the connection was for, if that is known.
	Name string
	// Address is where the sandbox wanted to connect to; Remote is what was dialled
	// instead, if the name has moved since.
	Address, Remote netip.AddrPort
	// Sent and Received are bytes, as the sandbox sees them.
	Sent, Received uint64
	// Rule has decided, Kind is its kind, and Reason says why in words.
	Rule, Kind, Reason string
	// Outcome is how it ended: open, closed, reset by remote, reset by sandbox, refused,
	// failed or cut.
	Outcome string
	// Repeated is how many further attempts were refused in the same way.
	Repeated uint64
}

// TrafficRequest asks for the log of a sandbox's network from an entry on. The first
// of all is 1, and so is 0. The answer has at most Max entries. If there is none yet, it
// comes after Wait at the latest.
type TrafficRequest struct {
	Key
	From uint64
	Max  int
	Wait time.Duration
	// Open asks for the connections that are open, too.
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
	// Next is where the next request begins; Lost is how many entries were dropped
	// before they were read.
	Next, Lost uint64
	// Open are connections that go on, the oldest first. They have no number yet.
	Open []Traffic
}
