package addresses

import (
	"fmt"
	"net/netip"
	"strings"
)

// maxRanges bounds the number of ranges that a node's configuration may close.
// maxPrefixText bounds the length of one range.
const (
	maxRanges     = 4096
	maxPrefixText = 64
)

// ParsePrefix reads an address or a range in CIDR notation. It refuses ambiguous
// text: bits beyond the prefix, zones, IPv4 written as IPv6.
func ParsePrefix(text string) (netip.Prefix, error) {
	if len(text) > maxPrefixText {
		return netip.Prefix{}, fmt.Errorf("%.20q... has more than the %d characters of the longest address", text, maxPrefixText)
	}
	if !strings.Contains(text, "/") {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return netip.Prefix{}, fmt.Errorf("%q is not an address", text)
		}
		switch {
		case a.Zone() != "":
			return netip.Prefix{}, fmt.Errorf("%q has a zone: leave %q out", text, "%"+a.Zone())
		case a.Is4In6():
			return netip.Prefix{}, fmt.Errorf("%q is IPv4 in the form of IPv6: write %v", text, a.Unmap())
		}
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(text)
	switch {
	case err != nil:
		return netip.Prefix{}, fmt.Errorf("%q is not a range of addresses such as 10.1.0.0/16", text)
	case p.Addr().Is4In6():
		return netip.Prefix{}, fmt.Errorf("%q is IPv4 in the form of IPv6: write it as IPv4", text)
	case p != p.Masked():
		return netip.Prefix{}, fmt.Errorf("%q has bits beyond its length: write %v, or %v for the one address", text, p.Masked(), p.Addr())
	}
	return p, nil
}

// ParseRanges reads the ranges that a node's configuration closes.
func ParseRanges(texts []string) ([]netip.Prefix, error) {
	if len(texts) > maxRanges {
		return nil, fmt.Errorf("%d ranges are more than %d", len(texts), maxRanges)
	}
	var out []netip.Prefix
	for i, text := range texts {
		p, err := ParsePrefix(strings.TrimSpace(text))
		if err != nil {
			return nil, fmt.Errorf("[%d]: %w", i, err)
		}
		out = append(out, p)
	}
	return out, nil
}
