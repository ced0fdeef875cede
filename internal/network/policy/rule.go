package policy

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"agentrun.dev/internal/network/addresses"
)

// Protocol is TCP or UDP.
type Protocol string

// The protocols. NoProtocol is the protocol of a rule that names no protocol.
const (
	NoProtocol Protocol = ""
	TCP        Protocol = "tcp"
	UDP        Protocol = "udp"
)

// Kind is the kind of the rule that has decided. There are few kinds, so that they
// can label metrics.
type Kind string

// The kinds.
const (
	ByName     Kind = "name"
	ByWildcard Kind = "wildcard"
	ByAddress  Kind = "address"
	// ByDefault: the default, egress, has decided.
	ByDefault Kind = "default"
	// ByClosed: the address is closed.
	ByClosed Kind = "closed"
)

// Rule is one entry of a policy. It comes from ParseRule; the zero Rule matches
// nothing. Rules can be compared with ==.
type Rule struct {
	protocol Protocol
	// name is set in rules by name. With wildcard the rule matches the names below
	// it.
	name     Name
	wildcard bool
	prefix   netip.Prefix // set in rules by address
	port     uint16       // 0 is every port
}

// ParseRule reads a rule.
func ParseRule(text string) (r Rule, err error) {
	if len(text) > maxRuleText {
		return Rule{}, fmt.Errorf("%s has %d characters, more than %d", quote(text), len(text), maxRuleText)
	}
	rest := text
	if scheme, after, ok := strings.Cut(text, "://"); ok {
		switch p := Protocol(strings.ToLower(scheme)); p {
		case TCP, UDP:
			r.protocol, rest = p, after
		default:
			return Rule{}, fmt.Errorf("%s: a rule can begin with tcp:// or udp://, not with %s", quote(text), quote(scheme+"://"))
		}
	}
	host, port, err := splitPort(rest)
	if err != nil {
		return Rule{}, fmt.Errorf("%s: %w", quote(text), err)
	}
	if port != "" {
		if r.port, err = parsePort(port); err != nil {
			return Rule{}, fmt.Errorf("%s: %w", quote(text), err)
		}
	}
	if err := r.setHost(host); err != nil {
		return Rule{}, err
	}
	return r, nil
}

// splitPort splits a port off. The text has a port if it has a colon that is not part
// of an IPv6 address.
func splitPort(text string) (host, port string, err error) {
	if inner, ok := strings.CutPrefix(text, "["); ok {
		host, after, closed := strings.Cut(inner, "]")
		switch {
		case !closed:
			return "", "", fmt.Errorf("a ] is missing")
		case !strings.Contains(host, ":"):
			return "", "", fmt.Errorf("only IPv6 is written in brackets")
		case after == "":
			return host, "", nil
		}
		port, ok := strings.CutPrefix(after, ":")
		if !ok || port == "" {
			return "", "", fmt.Errorf("after ] only a port can follow, as in [2001:db8::/32]:443")
		}
		return host, port, nil
	}
	switch strings.Count(text, ":") {
	case 0:
		return text, "", nil
	case 1:
		host, port, _ := strings.Cut(text, ":")
		if port == "" {
			return "", "", fmt.Errorf("the port after the colon is missing")
		}
		return host, port, nil
	}
	return text, "", nil
}

func (r *Rule) setHost(host string) (err error) {
	switch {
	case host == "*":
		return fmt.Errorf("%q: a rule for everything is egress: allow, or egress: deny", host)
	case strings.HasPrefix(host, "*."):
		r.wildcard = true
		r.name, err = ParseName(host[2:])
		return err
	case strings.Contains(host, "*"):
		return fmt.Errorf("%s: a * can only be the whole first part of a name, as in *.example.org", quote(host))
	case strings.ContainsAny(host, ":/%"):
		if at := strings.LastIndexByte(host, '/'); strings.Count(host, ":") > 1 && at >= 0 && strings.Contains(host[at:], ":") {
			return fmt.Errorf("%s: IPv6 with a port is written in brackets, as in [2001:db8::/32]:443", quote(host))
		}
		r.prefix, err = addresses.ParsePrefix(host)
		return err
	}
	if p, err := addresses.ParsePrefix(host); err == nil {
		r.prefix = p
		return nil
	}
	r.name, err = ParseName(host)
	return err
}

func parsePort(text string) (uint16, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 || text[0] == '0' || text[0] == '+' {
		return 0, fmt.Errorf("%s is not a port between 1 and 65535", quote(text))
	}
	return uint16(n), nil
}

// String is the rule in its canonical form, which ParseRule accepts.
func (r Rule) String() string {
	var b strings.Builder
	if r.protocol != NoProtocol {
		b.WriteString(string(r.protocol) + "://")
	}
	host := string(r.name)
	if r.wildcard {
		host = "*." + host
	}
	if r.prefix.IsValid() {
		host = r.prefix.String()
		if r.prefix.IsSingleIP() {
			host = r.prefix.Addr().String()
		}
		if r.prefix.Addr().Is6() && r.port != 0 {
			host = "[" + host + "]"
		}
	}
	b.WriteString(host)
	if r.port != 0 {
		fmt.Fprintf(&b, ":%d", r.port)
	}
	return b.String()
}

// MarshalText is String, for JSON.
func (r Rule) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText is ParseRule, for JSON.
func (r *Rule) UnmarshalText(text []byte) (err error) {
	*r, err = ParseRule(string(text))
	return err
}

// Kind is the kind of the rule.
func (r Rule) Kind() Kind {
	switch {
	case r.prefix.IsValid():
		return ByAddress
	case r.wildcard:
		return ByWildcard
	}
	return ByName
}

// matchesName says whether a rule matches a name.
func (r Rule) matchesName(n Name) bool {
	if r.wildcard {
		return n.Below(r.name)
	}
	return r.name != "" && r.name == n
}

// matchesPort says whether a rule matches a protocol and a port. allows says whether
// it is an allow rule or a deny rule.
func (r Rule) matchesPort(allows bool, proto Protocol, port uint16) bool {
	of := r.protocol
	if of == NoProtocol && allows {
		of = TCP
	}
	return (of == NoProtocol || of == proto) && (r.port == 0 || r.port == port)
}

// precision orders the rules that match the same name or address. The rule with the
// greatest precision decides.
func (r Rule) precision() int {
	host := len(r.name) // if two wildcards match a name, the longer one is below the other
	switch {
	case r.prefix.IsValid():
		host = r.prefix.Bits() + 128 - r.prefix.Addr().BitLen()
	case !r.wildcard:
		host = maxName + 1
	}
	if r.port != 0 {
		return 2*host + 1
	}
	return 2 * host
}
