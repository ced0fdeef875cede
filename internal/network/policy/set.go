package policy

import (
	"encoding/json"
	"fmt"
	"slices"
)

// maxPolicies bounds how often a policy can be narrowed, by a claim and by forks of
// forks.
const maxPolicies = 16

// Set holds the policies that apply to a sandbox, the widest first. A connection is
// allowed if each of them allows it. An empty Set allows nothing.
type Set []Policy

// Narrow returns the set of a sandbox that is bounded by all of parent and by child.
// The result allows only connections that both parent and child allow.
func Narrow(parent Set, child Policy) (Set, error) {
	if slices.ContainsFunc(parent, child.Equal) {
		return slices.Clone(parent), nil // child is in parent already
	}
	if len(parent) >= maxPolicies {
		return nil, fmt.Errorf("a network policy cannot be narrowed more than %d times: fork from a sandbox nearer to its template", maxPolicies-1)
	}
	return append(slices.Clone(parent), child), nil
}

// AllowsSomething says whether the set may allow any connection at all.
func (s Set) AllowsSomething() bool {
	return len(s) > 0 && !slices.ContainsFunc(s, func(p Policy) bool { return p.Egress != AllowByDefault && len(p.Allow) == 0 })
}

// UnmarshalJSON reads a set within its bounds.
func (s *Set) UnmarshalJSON(b []byte) error {
	var list []json.RawMessage
	if err := json.Unmarshal(b, &list); err != nil {
		return fmt.Errorf("network policies: %w", err)
	}
	if len(list) > maxPolicies {
		return fmt.Errorf("network policies: %d are more than %d", len(list), maxPolicies)
	}
	out := make(Set, len(list))
	for i, raw := range list {
		if err := out[i].UnmarshalJSON(raw); err != nil {
			return fmt.Errorf("[%d]: %w", i, err)
		}
	}
	*s = out
	return nil
}

// noPolicy is the decision of an empty set.
func noPolicy() Decision {
	return Decision{Kind: ByDefault, Rule: "egress: deny", Reason: "the sandbox has no network policy"}
}

// Name decides, by the rules by name alone, whether the sandbox may connect to a host
// of that name.
func (s Set) Name(n Name, proto Protocol, port uint16) Decision {
	d := noPolicy()
	for i, p := range s {
		is := p.Name(n, proto, port)
		if !is.Allowed {
			return is
		}
		d = telling(d, is, i == 0)
	}
	return d
}

// telling returns the more informative of two decisions that allow: the later one,
// which comes from the narrower policy, unless it is only a default.
func telling(d, is Decision, first bool) Decision {
	if first || is.Kind != ByDefault || d.Kind == ByDefault {
		return is
	}
	return d
}

// Resolvable decides whether a sandbox gets addresses for a name. It does if the set
// allows the name on some protocol and port.
func (s Set) Resolvable(n Name) Decision {
	matching, ports := s.about(n)
	refusal := noPolicy()
	for i, port := range ports {
		for _, proto := range []Protocol{TCP, UDP} {
			d := matching.Name(n, proto, port)
			if d.Allowed {
				return d
			}
			if i == 0 && proto == TCP {
				refusal = d
			}
		}
	}
	return refusal
}

// about returns the set with only the rules that match a name, and the ports of these
// rules after 0, which stands for all other ports. Decisions on all other ports are
// the same.
func (s Set) about(n Name) (Set, []uint16) {
	ports := []uint16{0}
	pick := func(rules []Rule) (out []Rule) {
		for _, r := range rules {
			if r.matchesName(n) {
				out = append(out, r)
				ports = append(ports, r.port)
			}
		}
		return out
	}
	out := make(Set, len(s))
	for i, p := range s {
		out[i] = Policy{Egress: p.Egress, Allow: pick(p.Allow), Deny: pick(p.Deny)}
	}
	slices.Sort(ports)
	return out, slices.Compact(ports)
}

// Connection is the decision about a connection, and about the names that it may be for.
type Connection struct {
	Decision
	// Names are the pinned names that the connection may be for. If NameNeeded is
	// set, it may be for no other name, and Names is not empty.
	Names []Name
	// NameNeeded says that a connection with a visible name (TLS, HTTP) must have one
	// of Names. Otherwise it may have no name, or any name that Admits allows.
	NameNeeded bool

	protocol Protocol
	port     uint16
	// open are the policies that allow the connection for all names except those that
	// their rules deny.
	open []Policy
}

// Connect decides about a connection.
func (s Set) Connect(q Query) Connection {
	c := Connection{Decision: noPolicy(), Names: allNames(q.Names), protocol: q.Protocol, port: q.Port}
	for i, p := range s {
		is, on, names := p.connect(q)
		c.Names = slices.DeleteFunc(c.Names, func(n Name) bool { return !slices.Contains(names, n) })
		switch on {
		case refused:
			return Connection{Decision: is}
		case byNames:
			c.NameNeeded = true
		case byDefault:
			c.open = append(c.open, p)
		case byAddress:
		}
		c.Decision = telling(c.Decision, is, i == 0)
	}
	if c.Allowed && (c.NameNeeded || len(q.Names) > 0 && len(c.open) > 0) && len(c.Names) == 0 {
		return Connection{Decision: Decision{
			Kind: c.Kind, Rule: c.Rule, Reason: fmt.Sprintf("the policies of template, claim and forks allow %s for different names, and for none together", q),
		}}
	}
	return c
}

// Looks says whether the name in the connection matters. If not, a rule by address
// has allowed the connection, and the name need not be read.
func (c Connection) Looks() bool { return c.NameNeeded || len(c.open) > 0 }

// Admits decides about the name in a connection's TLS or HTTP.
func (c Connection) Admits(n Name) Decision {
	if !c.Allowed {
		return c.Decision
	}
	if c.NameNeeded && !slices.Contains(c.Names, n) {
		return Decision{Kind: ByName, Rule: c.Rule, Reason: fmt.Sprintf("the connection says %s, and is allowed for %v", n, c.Names)}
	}
	d := c.Decision
	for _, p := range c.open {
		is := p.Name(n, c.protocol, c.port)
		if !is.Allowed {
			return is
		}
		d = telling(d, is, false)
	}
	return d
}
