package stack

import (
	"encoding/binary"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"agentrun.dev/internal/network/wire"
)

// newMessage returns a message with room for n bytes after the Ethernet header. It
// fills in the headers of a complete frame.
func (w *Wire) newMessage(kind uint16, n int) (message, data []byte) {
	m := make([]byte, headLen+n)
	w.putHead(m, wire.Header{}, kind)
	return m, m[headLen:]
}

func (w *Wire) putHead(b []byte, h wire.Header, kind uint16) {
	h.Put(b)
	copy(b[wire.HeaderLen:], w.cfg.MAC[:])
	copy(b[wire.HeaderLen+6:], w.cfg.GatewayMAC[:])
	binary.BigEndian.PutUint16(b[wire.HeaderLen+12:], kind)
}

// newPacket returns a message with room for n bytes after the IP header.
func (w *Wire) newPacket(from, to netip.Addr, protocol uint8, n int) (message, payload []byte) {
	if to.Is6() {
		m, b := w.newMessage(typeIPv6, header.IPv6MinimumSize+n)
		header.IPv6(b).Encode(&header.IPv6Fields{
			PayloadLength:     uint16(n),
			TransportProtocol: tcpip.TransportProtocolNumber(protocol),
			HopLimit:          64,
			SrcAddr:           tcpip.AddrFrom16(from.As16()),
			DstAddr:           tcpip.AddrFrom16(to.As16()),
		})
		return m, b[header.IPv6MinimumSize:]
	}
	m, b := w.newMessage(typeIPv4, header.IPv4MinimumSize+n)
	ip := header.IPv4(b)
	ip.Encode(&header.IPv4Fields{
		TotalLength: uint16(len(b)),
		Flags:       header.IPv4FlagDontFragment,
		TTL:         64,
		Protocol:    protocol,
		SrcAddr:     tcpip.AddrFrom4(from.As4()),
		DstAddr:     tcpip.AddrFrom4(to.As4()),
	})
	ip.SetChecksum(^ip.CalculateChecksum())
	return m, b[header.IPv4MinimumSize:]
}

// sum is the checksum of a transport header and its payload.
func sum(from, to netip.Addr, protocol uint8, payload []byte) uint16 {
	x := checksum.Checksum(from.AsSlice(), 0)
	x = checksum.Checksum(to.AsSlice(), x)
	x = checksum.Combine(x, uint16(protocol))
	x = checksum.Combine(x, uint16(len(payload)))
	return ^checksum.Checksum(payload, x)
}

// arp answers a request for the gateway (RFC 826).
func (w *Wire) arp(b []byte) {
	request := header.ARP(b)
	if !request.IsValid() {
		w.drop(DropMalformed)
		return
	}
	sender := netip.AddrFrom4([4]byte(request.ProtocolAddressSender()))
	target := netip.AddrFrom4([4]byte(request.ProtocolAddressTarget()))
	switch {
	case MAC(request.HardwareAddressSender()) != w.cfg.MAC || sender != w.cfg.Address && !sender.IsUnspecified():
		w.drop(DropSpoofed)
		return
	case request.Op() != header.ARPRequest || target != w.cfg.Gateway:
		w.drop(DropProtocol)
		return
	}
	m, data := w.newMessage(typeARP, header.ARPSize)
	reply := header.ARP(data)
	reply.SetIPv4OverEthernet()
	reply.SetOp(header.ARPReply)
	copy(reply.HardwareAddressSender(), w.cfg.GatewayMAC[:])
	copy(reply.ProtocolAddressSender(), w.cfg.Gateway.AsSlice())
	copy(reply.HardwareAddressTarget(), w.cfg.MAC[:])
	copy(reply.ProtocolAddressTarget(), sender.AsSlice())
	w.answer(m)
}

// neighbour handles neighbour discovery (RFC 4861), and reports whether p was a
// message of it. It answers solicitations for the gateway. It does not answer the
// sandbox's probe for its own address (RFC 4862 §5.4), nor its router solicitations,
// since its routes are configured.
func (w *Wire) neighbour(p *packet) bool {
	if len(p.payload) < header.ICMPv6MinimumSize {
		return false
	}
	switch header.ICMPv6(p.payload).Type() {
	case header.ICMPv6NeighborSolicit:
	case header.ICMPv6RouterSolicit, header.ICMPv6RouterAdvert, header.ICMPv6NeighborAdvert, header.ICMPv6RedirectMsg:
		w.drop(DropProtocol)
		return true
	default:
		return false
	}
	// A hop limit of 255 shows that no router has forwarded the message (RFC 4861
	// §7.1.1).
	if len(p.payload) < header.ICMPv6NeighborSolicitMinimumSize || p.all[7] != 255 {
		w.drop(DropMalformed)
		return true
	}
	target := netip.AddrFrom16([16]byte(p.payload[8:]))
	switch {
	case target != w.cfg.Gateway6 || p.from.IsUnspecified():
		w.drop(DropProtocol)
		return true
	case !w.isInside(p.from) && !p.from.IsLinkLocalUnicast():
		w.drop(DropSpoofed)
		return true
	}
	const size = header.ICMPv6NeighborAdvertMinimumSize + 8
	m, b := w.newPacket(w.cfg.Gateway6, p.from, protocolICMPv6, size)
	header.IPv6(m[headLen:]).SetHopLimit(255)
	b[0] = byte(header.ICMPv6NeighborAdvert)
	b[4] = 0xe0 // from a router, solicited, overrides
	copy(b[8:], target.AsSlice())
	b[24], b[25] = 2, 1 // target link-layer address, in units of 8 bytes (§4.6.1)
	copy(b[26:], w.cfg.GatewayMAC[:])
	header.ICMPv6(b).SetChecksum(sum(w.cfg.Gateway6, p.from, protocolICMPv6, b))
	w.answer(m)
	return true
}

// echo answers a ping of the gateway.
func (w *Wire) echo(p *packet) {
	const minimum = 8
	if len(p.payload) < minimum {
		w.drop(DropMalformed)
		return
	}
	request, reply := byte(header.ICMPv4Echo), byte(header.ICMPv4EchoReply)
	if p.to.Is6() {
		request, reply = byte(header.ICMPv6EchoRequest), byte(header.ICMPv6EchoReply)
	}
	if p.payload[0] != request || len(p.all) > w.cfg.MTU {
		w.drop(DropProtocol)
		return
	}
	m, b := w.newPacket(p.to, p.from, p.protocol, len(p.payload))
	copy(b, p.payload)
	b[0], b[2], b[3] = reply, 0, 0
	if p.to.Is6() {
		header.ICMPv6(b).SetChecksum(sum(p.to, p.from, protocolICMPv6, b))
	} else {
		header.ICMPv4(b).SetChecksum(^checksum.Checksum(b, 0))
	}
	w.answer(m)
}

// unreachable is a kind of unreachable: its codes in ICMP (RFC 792) and ICMPv6 (RFC
// 4443 §3.1).
type unreachable struct{ code4, code6 byte }

var (
	hostUnreachable = unreachable{1, 3}
	portUnreachable = unreachable{3, 4}
)

// maxQuote is how many bytes of a packet an ICMP error quotes: the headers.
const maxQuote = 80

// unreachableFor answers a packet with an ICMP error from the gateway. original has
// at least the packet's headers.
func (w *Wire) unreachableFor(original []byte, kind unreachable) []byte {
	original = original[:min(len(original), maxQuote)]
	if original[0]>>4 == 6 {
		m, b := w.newPacket(w.cfg.Gateway6, w.cfg.Address6, protocolICMPv6, 8+len(original))
		b[0], b[1] = byte(header.ICMPv6DstUnreachable), kind.code6
		copy(b[8:], original)
		header.ICMPv6(b).SetChecksum(sum(w.cfg.Gateway6, w.cfg.Address6, protocolICMPv6, b))
		return m
	}
	m, b := w.newPacket(w.cfg.Gateway, w.cfg.Address, protocolICMP, 8+len(original))
	b[0], b[1] = byte(header.ICMPv4DstUnreachable), kind.code4
	copy(b[8:], original)
	header.ICMPv4(b).SetChecksum(^checksum.Checksum(b, 0))
	return m
}

// newSegment makes a TCP segment without data.
func (w *Wire) newSegment(from, to netip.AddrPort, f header.TCPFields) []byte {
	m, b := w.newPacket(from.Addr(), to.Addr(), uint8(TCP), header.TCPMinimumSize)
	f.SrcPort, f.DstPort, f.DataOffset = from.Port(), to.Port(), header.TCPMinimumSize
	tcp := header.TCP(b)
	tcp.Encode(&f)
	tcp.SetChecksum(sum(from.Addr(), to.Addr(), uint8(TCP), b))
	return m
}

// resetFor answers a segment that belongs to no connection. The packet has a complete
// TCP header.
func (w *Wire) resetFor(packet []byte) []byte {
	var p packet4or6
	p.read(packet)
	tcp := header.TCP(p.payload)
	return w.resetTo(Tuple{
		TCP,
		netip.AddrPortFrom(p.from, tcp.SourcePort()),
		netip.AddrPortFrom(p.to, tcp.DestinationPort()),
	}, tcp, len(tcp)-int(tcp.DataOffset()))
}

// resetTo answers a sandbox's segment with size bytes after its TCP header (RFC 9293
// §3.5.2).
func (w *Wire) resetTo(t Tuple, tcp header.TCP, size int) []byte {
	f := header.TCPFields{Flags: header.TCPFlagRst}
	if flags := tcp.Flags(); flags&header.TCPFlagAck != 0 {
		f.SeqNum = tcp.AckNumber()
	} else {
		length := uint32(size)
		if flags&header.TCPFlagSyn != 0 {
			length++
		}
		if flags&header.TCPFlagFin != 0 {
			length++
		}
		f.Flags |= header.TCPFlagAck
		f.AckNum = tcp.SequenceNumber() + length
	}
	return w.newSegment(t.Outside, t.Inside, f)
}

// packet4or6 holds the parts of a packet that has been checked before.
type packet4or6 struct {
	from, to netip.Addr
	payload  []byte
}

func (p *packet4or6) read(b []byte) {
	if b[0]>>4 == 6 {
		p.from, p.to = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
		p.payload = b[header.IPv6MinimumSize:]
		return
	}
	p.from, p.to = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
	p.payload = b[header.IPv4MinimumSize:]
}

// strayACK makes an ACK that the sandbox's kernel does not expect, even if it has the
// connection. If sequence is outside of the kernel's window, it answers with the
// sequence number that it expects (RFC 9293 §3.10.7.4).
func (w *Wire) strayACK(t Tuple, sequence uint32) []byte {
	return w.newSegment(t.Outside, t.Inside, header.TCPFields{SeqNum: sequence, Flags: header.TCPFlagAck, WindowSize: 1})
}

// newDatagram makes a UDP datagram.
func (w *Wire) newDatagram(from, to netip.AddrPort, data []byte) []byte {
	size := header.UDPMinimumSize + len(data)
	m, b := w.newPacket(from.Addr(), to.Addr(), uint8(UDP), size)
	udp := header.UDP(b)
	udp.Encode(&header.UDPFields{SrcPort: from.Port(), DstPort: to.Port(), Length: uint16(size)})
	copy(udp.Payload(), data)
	x := sum(from.Addr(), to.Addr(), uint8(UDP), b)
	if x == 0 {
		x = 0xffff // 0 means that the datagram has no checksum (RFC 768)
	}
	udp.SetChecksum(x)
	return m
}
