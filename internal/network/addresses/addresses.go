// Package addresses decides which IP addresses are closed. No process that acts for a
// sandbox may connect to a closed address, unless an administrator or a rule names
// it. Closed are loopback, link-local, private, multicast and reserved addresses, the
// metadata services of the clouds, the host's own addresses, and the ranges that the
// node's configuration closes (a cluster's Pods, Services and nodes).
//
// An IPv6 address can stand for an IPv4 address that a translator or a tunnel will
// deliver to. Such an address is closed if the IPv4 address in it is. Only the
// well-known prefix of NAT64 (64:ff9b::/96) is open otherwise, because networks
// without IPv4 reach the internet through it. The other forms (6to4, Teredo,
// IPv4-compatible, IPv4-translated, local NAT64) are always closed: today's internet
// does not need them, and their destination depends on the host's network.
//
// The package is a leaf, so that every part that dials on behalf of others can use
// it: the sandboxes' network, image pulls, volumes.
package addresses

import (
	"fmt"
	"net/netip"
)

// Class is the purpose of an address.
type Class uint8

// The classes. Every class but Public is closed.
const (
	// Invalid is the class of the zero netip.Addr.
	Invalid Class = iota
	// Public addresses are reachable from everywhere.
	Public
	// Unspecified is 0.0.0.0 and ::. Linux connects them to the host's loopback.
	Unspecified
	Loopback
	LinkLocal
	// Metadata is the address of a cloud's service that gives credentials to any
	// client.
	Metadata
	// Private addresses belong to the network that the host is in.
	Private
	Multicast
	// Reserved addresses are for documentation, deprecated or not assigned.
	Reserved
	// Host is an address of the host itself, as its routing table says.
	Host
	// NodeRange is one of the ranges that the node's configuration closes.
	NodeRange
)

var classNames = [...]string{
	Invalid: "invalid", Public: "public", Unspecified: "unspecified", Loopback: "loopback", LinkLocal: "link-local", Metadata: "metadata",
	Private: "private", Multicast: "multicast", Reserved: "reserved", Host: "host", NodeRange: "node-range",
}

// String is the class in logs.
func (c Class) String() string {
	if int(c) < len(classNames) {
		return classNames[c]
	}
	return fmt.Sprintf("class(%d)", uint8(c))
}

// special is a range that is not entirely public.
type special struct {
	prefix netip.Prefix
	class  Class
	what   string
}

func ranges(class Class, what string, prefixes ...string) (out []special) {
	for _, p := range prefixes {
		out = append(out, special{netip.MustParsePrefix(p), class, what})
	}
	return out
}

// specials come from IANA's registries of special-purpose addresses (RFC 6890 and its
// updates) and from the documentation of the clouds. Of the ranges that contain an
// address, the one with the longest prefix decides.
var specials = concat(
	ranges(Unspecified, "the unspecified address", "0.0.0.0/32", "::/128"),
	ranges(Reserved, "this network (RFC 791)", "0.0.0.0/8"),
	ranges(Loopback, "loopback", "127.0.0.0/8", "::1/128"),
	ranges(LinkLocal, "link-local", "169.254.0.0/16", "fe80::/10"),

	ranges(Metadata, "metadata of AWS, Google Cloud, Azure, Oracle, OpenStack and others", "169.254.169.254/32", "fe80::a9fe:a9fe/128"),
	ranges(Metadata, "metadata, time and credentials of AWS", "169.254.169.253/32", "169.254.169.123/32", "169.254.170.2/32", "169.254.170.23/32", "fd00:ec2::/32"),
	ranges(Metadata, "metadata of Google Cloud", "fd20:ce::/32"),
	ranges(Metadata, "the wire server of Azure", "168.63.129.16/32"),
	ranges(Metadata, "metadata of Oracle Cloud", "192.0.0.192/32", "fd00:c1::a9fe:a9fe/128"),
	ranges(Metadata, "metadata of Alibaba Cloud", "100.100.100.200/32"),
	ranges(Metadata, "metadata of Volcano Engine", "100.96.0.96/32"),
	ranges(Metadata, "metadata of Tencent Cloud", "169.254.0.23/32"),
	ranges(Metadata, "metadata of Scaleway", "169.254.42.42/32", "fd00:42::42/128"),
	ranges(Metadata, "metadata of Linode", "169.254.169.255/32", "fd00:a9fe:a9fe::1/128"),

	ranges(Private, "private", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"),
	ranges(Private, "shared by a carrier's customers (RFC 6598)", "100.64.0.0/10"),
	ranges(Private, "assigned for protocols (RFC 6890)", "192.0.0.0/24"),
	ranges(Private, "for benchmarks of networks (RFC 2544)", "198.18.0.0/15"),
	ranges(Private, "site-local (RFC 3879)", "fec0::/10"),

	ranges(Multicast, "multicast", "224.0.0.0/4", "ff00::/8"),

	ranges(Reserved, "for documentation", "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20"),
	ranges(Reserved, "relays of 6to4 (RFC 7526)", "192.88.99.0/24"),
	ranges(Reserved, "reserved (RFC 1112)", "240.0.0.0/4"),
	ranges(Reserved, "assigned for protocols (RFC 2928)", "2001::/23"),
	// 2000::/3 is the whole space that is assigned to the internet. Addresses outside
	// of it that are not listed above, such as discard-only and segment routing, are
	// reserved.
	ranges(Reserved, "not an address of the internet", "::/0"),
	ranges(Public, "", "2000::/3", wellKnownNAT64.String()),
)

func concat(lists ...[]special) (out []special) {
	for _, l := range lists {
		out = append(out, l...)
	}
	return out
}

// place returns the narrowest known range that contains an address.
func place(a netip.Addr) special {
	best := special{class: Public}
	for _, s := range specials {
		if s.prefix.Contains(a) && (!best.prefix.IsValid() || s.prefix.Bits() > best.prefix.Bits()) {
			best = s
		}
	}
	return best
}

// Classify returns the class of a, from the address alone. An address that stands for
// another one has the class of that one, unless that is Public: see Embedded.
func Classify(a netip.Addr) Class { return classify(a).class }

func classify(a netip.Addr) special {
	if !a.IsValid() {
		return special{class: Invalid, what: "not an address"}
	}
	a = Normalize(a)
	own := place(a)
	inner, has := embeddedIn(a)
	if !has {
		return own
	}
	if worst, found := inner.worst(a); found {
		return worst
	}
	if inner.closed {
		return special{inner.prefix, Reserved, inner.what}
	}
	return own
}

// Normalize returns the form in which addresses are compared: IPv4 instead of
// IPv4-mapped IPv6, and without a zone.
func Normalize(a netip.Addr) netip.Addr { return a.Unmap().WithZone("") }
