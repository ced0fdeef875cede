package policy

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// Bounds of a node's internal domains.
const (
	maxInternalDomains = 64
	maxUpstreams       = 8
	dnsPort            = 53
)

// InternalDomain is a domain that the administrator's own DNS servers serve. If a
// rule by name allows a name in it, the private address that these servers give for
// it is open.
type InternalDomain struct {
	// Domain is the domain itself; names below it belong to it.
	Domain Name
	// Upstreams are asked in this order.
	Upstreams []netip.AddrPort
}

// Holds says whether a name is the domain itself or below it.
func (d InternalDomain) Holds(n Name) bool { return n == d.Domain || n.Below(d.Domain) }

// InternalDomains are a node's internal domains, sorted by name. In a configuration,
// and in JSON, they are an object: {"svc.cluster.local": ["10.96.0.10"]}.
type InternalDomains []InternalDomain

// ParseInternalDomains reads domains with the addresses of their DNS servers, each
// with or without a port.
func ParseInternalDomains(given map[string][]string) (InternalDomains, error) {
	if len(given) > maxInternalDomains {
		return nil, fmt.Errorf("%d domains are more than %d", len(given), maxInternalDomains)
	}
	var out InternalDomains
	for _, text := range slices.Sorted(maps.Keys(given)) {
		name, err := ParseName(strings.TrimPrefix(text, "."))
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(out, func(d InternalDomain) bool { return d.Domain == name }) {
			return nil, fmt.Errorf("%s is there twice", name)
		}
		d := InternalDomain{Domain: name}
		if n := len(given[text]); n == 0 || n > maxUpstreams {
			return nil, fmt.Errorf("%s: %d DNS servers are not between 1 and %d", name, n, maxUpstreams)
		}
		for _, server := range given[text] {
			u, err := ParseUpstream(server)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			d.Upstreams = append(d.Upstreams, u)
		}
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b InternalDomain) int { return strings.Compare(string(a.Domain), string(b.Domain)) })
	return out, nil
}

// ParseUpstream reads the address of a DNS server, with or without a port.
func ParseUpstream(text string) (netip.AddrPort, error) {
	a, err := netip.ParseAddrPort(text)
	if err != nil {
		addr, err := netip.ParseAddr(text)
		if err != nil {
			return netip.AddrPort{}, fmt.Errorf("%s is not an address of a DNS server, such as 10.96.0.10 or [fd00::10]:53", quote(text))
		}
		a = netip.AddrPortFrom(addr, dnsPort)
	}
	addr := a.Addr().Unmap()
	if a.Port() == 0 || addr.Zone() != "" || addr.IsUnspecified() || addr.IsMulticast() {
		return netip.AddrPort{}, fmt.Errorf("%s cannot be a DNS server: it needs the address of one host, and a port other than 0", quote(text))
	}
	return netip.AddrPortFrom(addr, a.Port()), nil
}

// For returns the domain that a name belongs to: the longest domain that contains it.
func (ds InternalDomains) For(n Name) (InternalDomain, bool) {
	var best InternalDomain
	for _, d := range ds {
		if d.Holds(n) && len(d.Domain) > len(best.Domain) {
			best = d
		}
	}
	return best, best.Domain != ""
}

// MarshalJSON writes the object that ParseInternalDomains reads.
func (ds InternalDomains) MarshalJSON() ([]byte, error) {
	out := map[string][]string{}
	for _, d := range ds {
		for _, u := range d.Upstreams {
			out[string(d.Domain)] = append(out[string(d.Domain)], u.String())
		}
	}
	return json.Marshal(out)
}

// UnmarshalJSON reads the output of MarshalJSON.
func (ds *InternalDomains) UnmarshalJSON(b []byte) error {
	var given map[string][]string
	if err := json.Unmarshal(b, &given); err != nil {
		return fmt.Errorf("internal domains: %w", err)
	}
	parsed, err := ParseInternalDomains(given)
	if err != nil {
		return fmt.Errorf("internal domains: %w", err)
	}
	*ds = parsed
	return nil
}
