package enginetest

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"agentrun.dev/internal/network/wire"
)

// packet is a received packet of IPv4 or IPv6.
type packet struct {
	from, to netip.Addr
	proto    byte
	data     []byte
}

// sum is the checksum of the contents; 0 if the packet is intact.
func (p packet) sum() uint16 {
	if p.proto == protoICMP {
		return checksum(p.data)
	}
	return checksum(append(p.pseudo(len(p.data)), p.data...))
}

// pseudo is the pseudo-header that all checksums but ICMP's also cover. Its length is
// even.
func (p packet) pseudo(length int) []byte {
	b := append(p.from.AsSlice(), p.to.AsSlice()...)
	return binary.BigEndian.AppendUint16(append(b, 0, p.proto), uint16(length))
}

// sumAt is the offset of the checksum in the contents.
func (p packet) sumAt() int {
	switch p.proto {
	case protoUDP:
		return 6
	case protoTCP:
		return 16
	}
	return 2
}

// reply is the message with a packet back to the sender. With a nonzero segment, the
// sandbox has to cut the packet into segments of that size. With 0 the packet is
// complete.
func (p packet) reply(data []byte, segment int) []byte {
	back := packet{from: p.to, to: p.from, proto: p.proto, data: data}
	kind, ip := uint16(etherIPv4), ipLen
	if back.from.Is6() {
		kind, ip = etherIPv6, ip6Len
	}
	var h wire.Header
	at := back.sumAt()
	data[at], data[at+1] = 0, 0
	if segment > 0 {
		h = wire.Header{
			Flags: wire.NeedsChecksum, GSO: wire.GSOTCPv4, SegmentSize: uint16(segment), HeadersLen: uint16(wire.EthernetLen + ip + tcpLen),
			ChecksumStart: uint16(wire.EthernetLen + ip), ChecksumOffset: uint16(at),
		}
		if back.from.Is6() {
			h.GSO = wire.GSOTCPv6
		}
		binary.BigEndian.PutUint16(data[at:], ^checksum(back.pseudo(len(data))))
	} else {
		binary.BigEndian.PutUint16(data[at:], back.sum())
	}
	var head [wire.HeaderLen]byte
	h.Put(head[:])
	return append(head[:], ethernet(kind, back.header(ip), data)...)
}

// header is the IP header of a packet.
func (p packet) header(n int) []byte {
	r := make([]byte, n)
	if p.from.Is6() {
		r[0], r[6], r[7] = 0x60, p.proto, 255
		binary.BigEndian.PutUint16(r[4:], uint16(len(p.data)))
		copy(r[8:], p.from.AsSlice())
		copy(r[24:], p.to.AsSlice())
		return r
	}
	r[0], r[8], r[9] = 0x45, 64, p.proto
	binary.BigEndian.PutUint16(r[2:], uint16(n+len(p.data)))
	copy(r[12:], p.from.AsSlice())
	copy(r[16:], p.to.AsSlice())
	binary.BigEndian.PutUint16(r[10:], checksum(r))
	return r
}

func ethernet(kind uint16, parts ...[]byte) []byte {
	mac := lanNetwork().MAC
	f := append(mac[:], lanMAC[:]...)
	return append(binary.BigEndian.AppendUint16(f, kind), slices.Concat(parts...)...)
}

// arpReply answers ARP requests for the gateway and the DNS server.
func arpReply(b []byte) [][]byte {
	if len(b) < 28 || b[7] != 1 {
		return nil
	}
	target := netip.AddrFrom4([4]byte(b[24:28]))
	if target != lanGateway && target != lanDNS {
		return nil
	}
	r := slices.Clone(b[:28])
	r[7] = 2
	copy(r[8:14], lanMAC[:])
	copy(r[14:18], b[24:28])
	copy(r[18:28], b[8:18])
	return [][]byte{append(make([]byte, wire.HeaderLen), ethernet(etherARP, r)...)}
}

// pong answers pings, and neighbour solicitations for the IPv6 addresses of gateway
// and DNS server.
func (p packet) pong() [][]byte {
	const echo, echo6, reply6, solicit, advertise = 8, 128, 129, 135, 136
	r := slices.Clone(p.data)
	switch {
	case p.proto == protoICMP && r[0] == echo:
		r[0] = 0
	case p.proto == protoICMPv6 && r[0] == echo6:
		r[0] = reply6
	case p.proto == protoICMPv6 && r[0] == solicit && len(r) >= 24:
		target := netip.AddrFrom16([16]byte(r[8:24]))
		if target != lanGateway6 && target != lanDNS6 || p.from.IsUnspecified() {
			return nil // a solicitation for a free address gets no answer
		}
		p.to = target // the address that answers
		r = append(r[:24:24], 2, 1)
		r = append(r, lanMAC[:]...)
		r[0], r[4] = advertise, 0x60 // flags: solicited, override
	default:
		return nil
	}
	return [][]byte{p.reply(r, 0)}
}

// checksum is the checksum of RFC 1071; over data with a valid checksum it is 0.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		word := uint32(b[i]) << 8
		if i+1 < len(b) {
			word |= uint32(b[i+1])
		}
		sum += word
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
