// Package policy decides what a sandbox may connect to. It parses rules once, into
// types that cannot be malformed, and does no input or output: package egress asks
// it, package dns asks it, the daemon stores what it has parsed.
//
// # Rules
//
// A rule is [tcp://|udp://]HOST[:PORT]. Without a port it holds for every port.
// HOST is one of
//
//   - a DNS name, such as api.example.org. Case and a trailing dot do not matter. An
//     internationalized name is written in its ASCII form (xn--...); the package
//     does not translate, because two translations that differ are a hole.
//   - a wildcard, such as *.example.org: all names below example.org, at any depth,
//     and not example.org itself.
//   - an address or a range: 203.0.113.7, 10.1.0.0/16, 2001:db8::1, 2001:db8::/32. With
//     a port, IPv6 is in brackets: [2001:db8::1]:443, [2001:db8::/32]:443.
//
// An allow rule without a protocol allows TCP. A deny rule without one denies both.
// So UDP, and QUIC with it, is open only where a rule says udp:// or where egress is
// allow.
//
// # Precedence
//
// Names. Of the rules that match a name, a port and a protocol, the most precise
// decides:
//
//  1. an exact name, then the longer wildcard, then the shorter one;
//  2. at the same host, a rule with a port before one without;
//  3. at equal precision, deny before allow.
//
// Without a rule the default decides: egress, which is deny or allow.
//
// Addresses. The same with "the longer prefix before the shorter one" in the first
// place. IPv4 and IPv6 compare by how many addresses a rule covers. An IPv6 address
// that stands for an IPv4 address (NAT64 and the like) is also denied by rules that
// deny the IPv4 address, and is not allowed by rules that allow it.
//
// Both. A connection is to an address, and the sandbox may have asked for the
// address by one or more names, which are pinned to it:
//
//  1. A deny rule by address refuses the connection, whatever a rule by name says:
//     where a server stands is not for its name to decide. Only a more precise allow
//     rule by address opens it again.
//  2. A closed address (package addresses) needs an allow rule by address that is
//     about it: all that the rule covers lies in the range that is closed. So
//     10.0.0.0/8 opens private addresses, and 0.0.0.0/0 does not. Or an upstream of
//     internalDomains has given the address for a name that an allow rule by name
//     allows: then private addresses and the node's closed ranges are open, others
//     are not. egress: allow opens no closed address.
//  3. An allow rule by address allows the connection. Names are not looked at.
//  4. Rules by name allow the connection for those of the pinned names that they
//     allow. What the sandbox then says in TLS or HTTP must be one of these.
//  5. With egress: allow the connection is allowed, unless each of the pinned names is
//     denied. What the sandbox says in TLS or HTTP must not be denied. If rules deny
//     names, UDP to port 443 is not open by default: the name inside of QUIC cannot be
//     seen, and programs go on over TCP.
//  6. Everything else is refused.
//
// # Narrowing
//
// The policies that hold for a sandbox are a Set: the template's, the claim's, those
// of the forks on the way. A connection is allowed if every one of them allows it,
// each by itself. Adding a policy to a set can therefore only take away, and what a
// set allows needs no proof about how rules of different policies combine. A Set
// without a policy allows nothing.
package policy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
)

// Bounds of a policy.
const (
	MaxRules    = 256 // in each of the two lists
	maxRuleText = 280 // a name of 253 bytes, with all that can be around it
)

// Egress is what holds where no rule matches.
type Egress string

// The defaults. An empty Egress is deny.
const (
	DenyByDefault  Egress = "deny"
	AllowByDefault Egress = "allow"
)

// ParseEgress reads a default. Empty text is deny.
func ParseEgress(text string) (Egress, error) {
	switch e := Egress(text); e {
	case "":
		return DenyByDefault, nil
	case DenyByDefault, AllowByDefault:
		return e, nil
	}
	return "", fmt.Errorf("%s is neither deny nor allow", quote(text))
}

// MarshalText writes deny for an empty one, too.
func (e Egress) MarshalText() ([]byte, error) {
	parsed, err := ParseEgress(string(e))
	return []byte(parsed), err
}

// UnmarshalText reads what MarshalText writes.
func (e *Egress) UnmarshalText(text []byte) (err error) {
	*e, err = ParseEgress(string(text))
	return err
}

// Policy is what a sandbox may connect to, as one person has written it. The zero
// Policy allows nothing. A Policy is not changed after it was made.
type Policy struct {
	Egress Egress `json:"egress"`
	Allow  []Rule `json:"allow,omitempty"`
	Deny   []Rule `json:"deny,omitempty"`
}

// Parse reads a policy. The error names the field.
func Parse(egress string, allow, deny []string) (p Policy, err error) {
	if p.Egress, err = ParseEgress(egress); err != nil {
		return Policy{}, fmt.Errorf("egress: %w", err)
	}
	if p.Allow, err = parseRules("allow", allow); err != nil {
		return Policy{}, err
	}
	if p.Deny, err = parseRules("deny", deny); err != nil {
		return Policy{}, err
	}
	return p, nil
}

func parseRules(field string, texts []string) (out []Rule, err error) {
	if len(texts) > MaxRules {
		return nil, fmt.Errorf("%s: %d rules are more than %d", field, len(texts), MaxRules)
	}
	for i, text := range texts {
		r, err := ParseRule(text)
		if err != nil {
			return nil, fmt.Errorf("%s[%d]: %w", field, i, err)
		}
		out = append(out, r)
	}
	return out, nil
}

// Texts are rules in their canonical form.
func Texts(rules []Rule) (out []string) {
	for _, r := range rules {
		out = append(out, r.String())
	}
	return out
}

// Equal says whether two policies have the same rules in the same order.
func (p Policy) Equal(o Policy) bool {
	return (p.Egress == AllowByDefault) == (o.Egress == AllowByDefault) && slices.Equal(p.Allow, o.Allow) && slices.Equal(p.Deny, o.Deny)
}

// Validate refuses a policy that was put together by hand and that Parse would refuse.
func (p Policy) Validate() error {
	if slices.Contains(p.Allow, Rule{}) || slices.Contains(p.Deny, Rule{}) {
		return fmt.Errorf("a rule is empty")
	}
	_, err := Parse(string(p.Egress), Texts(p.Allow), Texts(p.Deny))
	return err
}

// UnmarshalJSON reads a policy. A field that it does not know is an error, because
// what is not understood might have been a restriction.
func (p *Policy) UnmarshalJSON(b []byte) error {
	var form struct {
		Egress string   `json:"egress"`
		Allow  []string `json:"allow"`
		Deny   []string `json:"deny"`
	}
	if err := strictly(b, &form); err != nil {
		return fmt.Errorf("network policy: %w", err)
	}
	parsed, err := Parse(form.Egress, form.Allow, form.Deny)
	if err != nil {
		return fmt.Errorf("network policy: %w", err)
	}
	*p = parsed
	return nil
}

func strictly(b []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	return dec.Decode(v)
}
