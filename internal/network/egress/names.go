package egress

import (
	"fmt"
	"net/netip"
	"time"

	"agentrun.dev/internal/network/addresses"
	"agentrun.dev/internal/network/dns"
	"agentrun.dev/internal/network/policy"
)

// names is a Sandbox as the resolver sees it: its dns.Asker.
type names Sandbox

// MayResolve allows names that the policy allows on some port.
func (n *names) MayResolve(text string) dns.Verdict {
	name, err := policy.ParseName(text)
	if err != nil {
		return dns.Verdict{}
	}
	d := (*Sandbox)(n).current().Policy.Resolvable(name)
	verdict := dns.Verdict{Allowed: d.Allowed}
	if d.Kind == policy.ByWildcard {
		verdict.Wildcard = d.Rule
	}
	return verdict
}

// MayAlias refuses an alias that a rule denies, unless a rule allows the name that leads to it:
// otherwise anybody's name could stand in for a denied one.
func (n *names) MayAlias(text, alias string) bool {
	rules := (*Sandbox)(n).current()
	name, err := policy.ParseName(text)
	if err != nil {
		return false
	}
	if rules.Policy.Resolvable(name).Kind != policy.ByDefault {
		return true
	}
	target, err := policy.ParseName(alias)
	if err != nil {
		return true // no rule can be about it
	}
	d := rules.Policy.Resolvable(target)
	return d.Allowed || d.Kind == policy.ByDefault
}

// Resolved pins the addresses that the sandbox may be told.
func (n *names) Resolved(text string, answer dns.Answer) ([]netip.Addr, string) {
	s := (*Sandbox)(n)
	name, err := policy.ParseName(text)
	if err != nil {
		return nil, err.Error()
	}
	rules := s.current()
	// Without a rule about the name, an internal domain's private addresses stay unknown.
	internal := answer.Internal && rules.Policy.Resolvable(name).Kind != policy.ByDefault
	var open []netip.Addr
	kept := "it has no addresses"
	for _, addr := range answer.Addrs {
		v := s.gateway.config.Guard.Check(addr)
		if s.gateway.inside(v.Addr) {
			kept = fmt.Sprintf("%v is the gateway's network", v.Addr)
			continue
		}
		if !v.Closed() || rules.Policy.Opens(v) || (internal && internalMayOpen(v.Class)) {
			open = append(open, addr)
		} else {
			kept = v.Reason
		}
	}
	if len(open) > 0 {
		s.mu.Lock()
		s.pins.add(name, open, answer.Internal, answer.Expires)
		s.mu.Unlock()
	}
	return open, kept
}

// internalMayOpen is true for the classes that an internal domain's upstream may give.
func internalMayOpen(class addresses.Class) bool {
	return class == addresses.Private || class == addresses.NodeRange
}

// Refused logs a question that was refused.
func (n *names) Refused(text string, reason dns.Reason, detail string) {
	s := (*Sandbox)(n)
	d := policy.Decision{Kind: ByDNS, Rule: "dns", Reason: string(reason)}
	switch reason {
	case dns.ReasonPolicy:
		if name, err := policy.ParseName(text); err != nil {
			d.Reason = err.Error()
		} else {
			d = s.current().Policy.Resolvable(name)
		}
	case dns.ReasonAddresses:
		d = policy.Decision{Kind: policy.ByClosed, Rule: "closed", Reason: detail}
	default:
		if detail != "" {
			d.Reason += ": " + detail
		}
	}
	now := time.Now()
	s.refuse(Entry{Time: now, Ended: now, Protocol: "dns", Name: text}, d)
}

// refuse logs and counts a refusal.
func (s *Sandbox) refuse(e Entry, d policy.Decision) {
	e.Rule, e.Kind, e.Reason, e.Outcome = d.Rule, d.Kind, d.Reason, Refused
	s.counters.refused(d.Kind)
	s.gateway.counters.refused(d.Kind)
	s.log.add(e)
}
