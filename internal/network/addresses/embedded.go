package addresses

import "net/netip"

var (
	wellKnownNAT64 = netip.MustParsePrefix("64:ff9b::/96")   // RFC 6052
	localNAT64     = netip.MustParsePrefix("64:ff9b:1::/48") // RFC 8215
	translated     = netip.MustParsePrefix("::ffff:0:0:0/96")
	compatible     = netip.MustParsePrefix("::/96")
	sixToFour      = netip.MustParsePrefix("2002::/16") // RFC 3056
	teredo         = netip.MustParsePrefix("2001::/32") // RFC 4380
)

// embedded is one IPv4 address within an IPv6 address.
type embedded struct {
	addr netip.Addr
	// at is the bit at which it begins, or -1 if its bits are not contiguous.
	at int
}

// outer is the range of IPv6 addresses around a that contain an address of in.
func (e embedded) outer(in netip.Prefix, a netip.Addr) netip.Prefix {
	if e.at < 0 {
		return netip.PrefixFrom(a, a.BitLen())
	}
	return netip.PrefixFrom(a, e.at+in.Bits()).Masked()
}

// form is a kind of IPv6 address that stands for IPv4 addresses.
type form struct {
	what   string
	prefix netip.Prefix
	closed bool // closed even if the IPv4 addresses in it are public
	addrs  []embedded
}

// worst is the most dangerous address within a that is not public. If an address can
// be read in several ways, the wrong readings look unspecified or reserved, because
// of the zeros around the right one. These readings are skipped, and a rule must name
// the whole of a.
func (f form) worst(a netip.Addr) (out special, found bool) {
	several := len(f.addrs) > 1
	for _, e := range f.addrs {
		in := place(e.addr)
		if in.class == Public || several && (in.class == Unspecified || in.class == Reserved) || found && in.class != Metadata {
			continue
		}
		out, found = special{e.outer(in.prefix, a), in.class, in.what + ", inside of " + f.what}, true
		if several {
			out.prefix = single(a)
		}
	}
	return out, found
}

// embeddedIn finds the IPv4 addresses within a, which is normalized.
func embeddedIn(a netip.Addr) (form, bool) {
	if !a.Is6() {
		return form{}, false
	}
	b := a.As16()
	at := func(octet int) embedded {
		return embedded{netip.AddrFrom4([4]byte(b[octet : octet+4])), octet * 8}
	}
	switch {
	case wellKnownNAT64.Contains(a):
		return form{what: "NAT64", prefix: wellKnownNAT64, addrs: []embedded{at(12)}}, true
	case localNAT64.Contains(a):
		// A translator's choice among them depends on its prefix. So all places of
		// RFC 6052 are checked, and octet 8 is skipped.
		return form{what: "local NAT64", prefix: localNAT64, closed: true, addrs: []embedded{
			at(12), at(9),
			{netip.AddrFrom4([4]byte{b[7], b[9], b[10], b[11]}), -1},
			{netip.AddrFrom4([4]byte{b[6], b[7], b[9], b[10]}), -1},
		}}, true
	case translated.Contains(a):
		return form{what: "an IPv4-translated address", prefix: translated, closed: true, addrs: []embedded{at(12)}}, true
	case compatible.Contains(a) && !a.IsUnspecified() && !a.IsLoopback():
		return form{what: "an IPv4-compatible address", prefix: compatible, closed: true, addrs: []embedded{at(12)}}, true
	case sixToFour.Contains(a):
		return form{what: "6to4", prefix: sixToFour, closed: true, addrs: []embedded{at(2)}}, true
	case teredo.Contains(a):
		client := netip.AddrFrom4([4]byte{^b[12], ^b[13], ^b[14], ^b[15]})
		return form{what: "Teredo", prefix: teredo, closed: true, addrs: []embedded{{client, -1}, at(4)}}, true
	}
	return form{}, false
}

// Embedded lists the IPv4 addresses that an IPv6 address may stand for. A rule that
// denies one of them denies the IPv6 address, too.
func Embedded(a netip.Addr) (out []netip.Addr) {
	inner, _ := embeddedIn(Normalize(a))
	for _, e := range inner.addrs {
		out = append(out, e.addr)
	}
	return out
}
