package policy

import (
	"fmt"
	"net/netip"
	"slices"

	"agentrun.dev/internal/network/addresses"
)

// Decision says whether a connection or a name is allowed, and why, for the log.
type Decision struct {
	Allowed bool
	Kind    Kind
	// Rule is the rule that has decided, in its canonical form, or the default:
	// "egress: deny" or "egress: allow".
	Rule   string
	Reason string
}

// best returns the rule that decides, among the matching ones.
func (p Policy) best(match func(r Rule, allows bool) bool) (best Rule, allows, found bool) {
	look := func(rules []Rule, allowing bool) {
		for _, r := range rules {
			if (!found || r.precision() > best.precision()) && match(r, allowing) {
				best, allows, found = r, allowing, true
			}
		}
	}
	look(p.Deny, false) // deny comes first, so that it wins at equal precision
	look(p.Allow, true)
	return best, allows, found
}

// byRule is the decision of a rule.
func byRule(r Rule, allows bool, about string) Decision {
	verb := "denies"
	if allows {
		verb = "allows"
	}
	return Decision{Allowed: allows, Kind: r.Kind(), Rule: r.String(), Reason: fmt.Sprintf("%s %s %s", r, verb, about)}
}

// byDefault is the decision of the default, where no rule matches.
func (p Policy) byDefault(about string) Decision {
	if p.Egress == AllowByDefault {
		return Decision{Allowed: true, Kind: ByDefault, Rule: "egress: allow", Reason: "no rule is about " + about + ", and egress is allow"}
	}
	return Decision{Kind: ByDefault, Rule: "egress: deny", Reason: "no rule is about " + about + ", and egress is deny"}
}

// Name decides, by the rules by name alone, whether the sandbox may connect to a host
// of that name.
func (p Policy) Name(n Name, proto Protocol, port uint16) Decision {
	about := fmt.Sprintf("%s port %d of %s", proto, port, n)
	if port == 0 {
		about = fmt.Sprintf("%s of %s", proto, n)
	}
	r, allows, found := p.best(func(r Rule, allows bool) bool { return r.matchesName(n) && r.matchesPort(allows, proto, port) })
	if !found {
		return p.byDefault(about)
	}
	return byRule(r, allows, about)
}

// address returns the deciding rule by address, if one matches.
func (p Policy) address(a netip.Addr, proto Protocol, port uint16) (best Rule, allows, found bool) {
	inner := addresses.Embedded(a)
	return p.best(func(r Rule, allows bool) bool {
		if !r.matchesPort(allows, proto, port) {
			return false
		}
		return r.prefix.Contains(a) || !allows && slices.ContainsFunc(inner, r.prefix.Contains)
	})
}

// Query is a connection that a sandbox asks for.
type Query struct {
	Protocol Protocol
	// To is the verdict of addresses.Guard.Check on the address.
	To   addresses.Verdict
	Port uint16
	// Names are pinned to the address: the sandbox got the address as an answer for
	// each of them.
	Names []Pinned
}

// Pinned is a name for which a sandbox got an address.
type Pinned struct {
	Name Name
	// Internal says that an upstream of internalDomains has given the address.
	Internal bool
}

func (q Query) String() string {
	return fmt.Sprintf("%s to %s", q.Protocol, netip.AddrPortFrom(q.To.Addr, q.Port))
}

// basis is the reason for which a policy has allowed a connection.
type basis uint8

const (
	refused   basis = iota
	byAddress       // names do not matter
	byNames         // it is for certain names
	byDefault       // it is for all names but those that rules deny
)

// connect decides about a connection by one policy. names are the pinned names that
// the connection may be for.
func (p Policy) connect(q Query) (d Decision, on basis, names []Name) {
	r, allows, found := p.address(q.To.Addr, q.Protocol, q.Port)
	if found && !allows {
		return byRule(r, false, q.String()), refused, nil
	}
	opened := found && q.To.OpenedBy(r.prefix)
	if q.To.Closed() && !opened {
		return p.connectClosed(q)
	}
	if found {
		return byRule(r, true, q.String()), byAddress, allNames(q.Names)
	}
	var denied Decision
	byRules := false // whether a rule, and not the default, allows at least one of the names
	for _, n := range q.Names {
		is := p.Name(n.Name, q.Protocol, q.Port)
		if !is.Allowed {
			denied = is
			continue
		}
		if is.Kind != ByDefault && !byRules || d.Rule == "" {
			d, byRules = is, is.Kind != ByDefault
		}
		names = append(names, n.Name)
	}
	switch {
	case byRules && p.Egress != AllowByDefault:
		return d, byNames, names
	case p.Egress != AllowByDefault && denied.Rule != "", len(q.Names) > 0 && len(names) == 0:
		return denied, refused, nil
	case p.Egress != AllowByDefault:
		return Decision{Kind: ByDefault, Rule: "egress: deny", Reason: fmt.Sprintf("no rule allows %s, and no name is pinned to the address", q)}, refused, nil
	case q.Protocol == UDP && q.Port == 443 && !byRules && p.deniesNames():
		return Decision{
			Kind: ByDefault, Rule: "egress: allow",
			Reason: fmt.Sprintf("rules deny names, and in %s (QUIC) names cannot be seen; allow it by name with udp://NAME:443", q),
		}, refused, nil
	case d.Rule != "":
		return d, byDefault, names
	}
	return p.byDefault(q.String()), byDefault, nil
}

// connectClosed decides about a closed address that no rule by address opens.
func (p Policy) connectClosed(q Query) (Decision, basis, []Name) {
	var d Decision
	var names []Name
	for _, n := range q.Names {
		is := p.Name(n.Name, q.Protocol, q.Port)
		if n.Internal && is.Allowed && is.Kind != ByDefault {
			d = is
			names = append(names, n.Name)
		}
	}
	if len(names) > 0 && internalMayOpen(q.To.Class) {
		return d, byNames, names
	}
	reason := q.To.Reason
	if q.To.Range.IsValid() {
		reason += fmt.Sprintf("; only a rule by address that lies within %v opens it", q.To.Range)
	}
	return Decision{Kind: ByClosed, Rule: "closed: " + q.To.Class.String(), Reason: reason}, refused, nil
}

func (p Policy) deniesNames() bool {
	return slices.ContainsFunc(p.Deny, func(r Rule) bool { return r.Kind() != ByAddress })
}

func allNames(pinned []Pinned) (out []Name) {
	for _, n := range pinned {
		out = append(out, n.Name)
	}
	return out
}
