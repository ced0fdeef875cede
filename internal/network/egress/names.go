package egress

import (
	"fmt"
	"net/netip"
	"time"

	"agentrun.dev/internal/network/dns"
	"agentrun.dev/internal/network/policy"
)

// names is the Sandbox as a dns.Asker, for the resolver.
type names Sandbox

// MayResolve allows the names that the policy allows on some port.
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

// MayAlias asks the policy whether alias may be an alias of the name.
func (n *names) MayAlias(text, alias string) bool {
	name, err := policy.ParseName(text)
	if err != nil {
		return false
	}
	target, err := policy.ParseName(alias)
	if err != nil {
		return true // no rule can match it
	}
	return (*Sandbox)(n).current().Policy.LeadsTo(name, target)
}

// Resolved pins the addresses that the sandbox may learn.
func (n *names) Resolved(text string, answer dns.Answer) ([]netip.Addr, string) {
	s := (*Sandbox)(n)
	name, err := policy.ParseName(text)
	if err != nil {
		return nil, err.Error()
	}
	rules := s.current()
	var open []netip.Addr
	kept := "it has no addresses"
	for _, addr := range answer.Addrs {
		v := s.gateway.config.Guard.Check(addr)
		if s.gateway.inside(v.Addr) {
			kept = fmt.Sprintf("%v is the gateway's network", v.Addr)
			continue
		}
		if rules.Policy.Tells(name, v, answer.Internal) {
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
