package addresses

import (
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
)

// Owner knows the host's own addresses. Routes is the implementation that asks the
// kernel.
type Owner interface {
	// Owns says whether packets to a stay on the host, or go to all of a network. as
	// describes that in words. An error means that the answer is unknown.
	Owns(a netip.Addr) (owns bool, as string, err error)
}

// Guard decides which addresses are closed on one host. It is safe for concurrent use.
type Guard struct {
	host   Owner
	closed atomic.Pointer[[]netip.Prefix]
}

// NewGuard makes a guard of a host's addresses and of the ranges that its
// configuration closes.
func NewGuard(host Owner, closed []netip.Prefix) *Guard {
	g := &Guard{host: host}
	g.SetClosed(closed)
	return g
}

// SetClosed replaces the ranges that the node's configuration closes. Checks that
// are under way see the old or the new ones, never a mixture.
func (g *Guard) SetClosed(closed []netip.Prefix) {
	closed = slices.Clone(closed)
	g.closed.Store(&closed)
}

// Verdict is the result of checking an address.
type Verdict struct {
	// Addr is the address, normalized.
	Addr  netip.Addr
	Class Class
	// Range is the narrowest range that closes the address. A rule opens the address
	// only if the whole range of the rule lies within Range. So a rule for 10.0.0.0/8
	// opens neither the host's own address in it nor a cluster's, whose Ranges are
	// narrower, and a rule for 0.0.0.0/0 opens no closed address. Range is not valid
	// if the address is open, or if no rule can open it.
	Range netip.Prefix
	// Reason says why the address is closed, for a log; empty if it is open.
	Reason string
}

// Closed says whether the address is closed.
func (v Verdict) Closed() bool { return v.Class != Public }

// OpenedBy says whether a rule for the range p opens the address.
func (v Verdict) OpenedBy(p netip.Prefix) bool {
	return !v.Closed() || v.Range.IsValid() && p.IsValid() && p.Contains(v.Addr) && p.Bits() >= v.Range.Bits()
}

// Check classifies an address. If the kernel cannot tell whether the address is the
// host's, it is closed.
func (g *Guard) Check(addr netip.Addr) Verdict {
	if !addr.IsValid() {
		return Verdict{Class: Invalid, Reason: "it is not an address"}
	}
	a := Normalize(addr)
	v := Verdict{Addr: a, Class: Public}
	if s := classify(a); s.class != Public {
		v.close(s.class, s.prefix, s.what)
	}
	for _, p := range *g.closed.Load() {
		if p.Contains(a) {
			v.close(NodeRange, p, "closed by the node's configuration")
		}
	}
	for _, p := range *g.closed.Load() {
		for _, inner := range Embedded(a) {
			if p.Contains(inner) {
				v.close(NodeRange, single(a), fmt.Sprintf("it stands for %v, which the node's configuration closes with %v", inner, p))
			}
		}
	}
	g.askHost(&v)
	return v
}

// close narrows the range that closes the address. The class of an address that is
// special on every host stays, so that a node's range cannot make a metadata address
// look like a service of the cluster.
func (v *Verdict) close(c Class, by netip.Prefix, what string) {
	if v.Closed() && by.Bits() <= v.Range.Bits() {
		return
	}
	v.Range = by
	if !v.Closed() || v.Class == Private || v.Class == NodeRange {
		v.Class = c
		v.Reason = fmt.Sprintf("%v is closed: %s (%v)", v.Addr, what, by)
	}
}

// askHost closes the host's own addresses. It does not ask about classes that never
// leave the host, or whose addresses are closed one by one already. Nor does it ask
// about link-local addresses of IPv6, which cannot be dialled without a zone.
func (g *Guard) askHost(v *Verdict) {
	switch v.Class {
	case Public, Private, NodeRange, Reserved:
	case LinkLocal:
		if !v.Addr.Is4() {
			return
		}
	default:
		return
	}
	for i, a := range append([]netip.Addr{v.Addr}, Embedded(v.Addr)...) {
		if i > 0 && place(a).class == Unspecified {
			continue // a wrong reading of local NAT64; other unspecified addresses are closed already
		}
		owns, as, err := g.host.Owns(a)
		if err != nil {
			*v = Verdict{Addr: v.Addr, Class: Host, Reason: fmt.Sprintf("%v is closed: whether it is the host's own is not known: %v", v.Addr, err)}
			return
		}
		if owns {
			*v = Verdict{Addr: v.Addr, Class: Host, Range: single(v.Addr), Reason: fmt.Sprintf("%v is closed: it is %s", v.Addr, as)}
			return
		}
	}
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
