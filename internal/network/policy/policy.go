// Package policy decides which hosts a sandbox may connect to. It parses rules once,
// into types that cannot be malformed, and does no input or output. Packages egress
// and dns ask it for decisions, and the daemon stores the parsed policies.
//
// # Rules
//
// A rule is [tcp://|udp://]HOST[:PORT]. Without a port it holds for every port. HOST
// is one of
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
// Both. A connection is to an address, and the sandbox may have asked for the address
// by one or more names, which are pinned to it:
//
//  1. A deny rule by address refuses the connection, whatever a rule by name says:
//     a name must not decide about an address. Only a more precise allow
//     rule by address opens it again.
//  2. A closed address (package addresses) needs an allow rule by address that is
//     about it: the whole range of the rule lies in the closed range. So
//     10.0.0.0/8 opens private addresses, and 0.0.0.0/0 does not. Or an upstream of
//     internalDomains has given the address for a name that an allow rule by name
//     allows: then private addresses and the node's closed ranges are open, others
//     are not. egress: allow opens no closed address.
//  3. An allow rule by address allows the connection. Names do not matter.
//  4. Rules by name allow the connection for those of the pinned names that they
//     allow. The name in TLS or HTTP must then be one of these.
//  5. With egress: allow the connection is allowed, unless each of the pinned names is
//     denied. The name in TLS or HTTP must not be denied. If rules deny
//     names, UDP to port 443 is not open by default: the name inside of QUIC cannot be
//     seen, and programs go on over TCP.
//  6. Everything else is refused.
//
// # Narrowing
//
// The policies that apply to a sandbox are a Set: the template's, the claim's, and
// those of the forks on the way. A connection is allowed if each policy by itself
// allows it. So adding a policy to a set can only take permissions away, and rules of
// different policies need not be combined. A Set without a policy allows nothing.
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
	maxRuleText = 280 // a name of 253 bytes, with protocol, wildcard and port
)

// Egress is the default, for connections that no rule matches.
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

// MarshalText also writes deny for an empty Egress.
func (e Egress) MarshalText() ([]byte, error) {
	parsed, err := ParseEgress(string(e))
	return []byte(parsed), err
}

// UnmarshalText reads the output of MarshalText.
func (e *Egress) UnmarshalText(text []byte) (err error) {
	*e, err = ParseEgress(string(text))
	return err
}

// Policy is one set of rules, as one person has written it. The zero Policy allows
// nothing. A Policy does not change after it was made.
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

// Equal reports whether two policies have the same rules in the same order.
func (p Policy) Equal(o Policy) bool {
	return (p.Egress == AllowByDefault) == (o.Egress == AllowByDefault) && slices.Equal(p.Allow, o.Allow) && slices.Equal(p.Deny, o.Deny)
}

// Validate refuses a policy that was not made by Parse and that Parse would refuse.
func (p Policy) Validate() error {
	if slices.Contains(p.Allow, Rule{}) || slices.Contains(p.Deny, Rule{}) {
		return fmt.Errorf("a rule is empty")
	}
	_, err := Parse(string(p.Egress), Texts(p.Allow), Texts(p.Deny))
	return err
}

// UnmarshalJSON reads a policy. An unknown field is an error, since it might have
// been a restriction.
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
