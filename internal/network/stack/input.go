package stack

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"agentrun.dev/internal/network/wire"
)

const (
	typeIPv4 = 0x0800
	typeARP  = 0x0806
	typeVLAN = 0x8100
	typeQinQ = 0x88a8
	typeIPv6 = 0x86dd

	protocolICMP   = 1
	protocolICMPv6 = 58
)

// maxBatches bounds how much is read of one wire before others get their turn.
const maxBatches = 4

// read reads the messages that a sandbox has sent. It never waits.
func (w *Wire) read(in *input) {
	var rest time.Duration
	for range maxBatches {
		n, err := in.receive(w.fd)
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		if err != nil {
			w.readFailed(err)
			return
		}
		for i := range n {
			size := int(in.headers[i].len)
			w.counters.framesIn.Add(1)
			w.counters.bytesIn.Add(uint64(size))
			rest = w.up.take(size)
			w.frame(in, i)
		}
		if rest > 0 || n < batch {
			break
		}
	}
	w.doneReading(rest, false)
}

// readFailed handles an error that the socket had stored. ECONNRESET, for example,
// means that the other end was closed with frames unread. An error that stays is the
// end of the wire.
func (w *Wire) readFailed(first error) {
	var probe [1]byte
	_, _, err := unix.Recvfrom(w.fd, probe[:], unix.MSG_DONTWAIT|unix.MSG_PEEK)
	w.doneReading(0, err != nil && !errors.Is(err, unix.EAGAIN) && errors.Is(err, first))
}

// packet is an IP packet from a sandbox, checked up to and including its IP header.
type packet struct {
	// all is the packet without padding, and payload is its part after the IP header.
	all, payload []byte
	from, to     netip.Addr
	protocol     uint8
	// in and i locate the message in the input that it was read into.
	in *input
	i  int
	// segmented says whether it is a long TCP segment.
	segmented bool
}

// frame handles message i of in.
func (w *Wire) frame(in *input, i int) {
	head, data := in.message(i)
	if head == nil {
		w.drop(DropMalformed)
		return
	}
	h := wire.Get(head)
	if h.Check(wire.EthernetLen+len(data)) != nil {
		w.drop(DropMalformed)
		return
	}
	if !h.Segmented() && len(data) > w.cfg.MTU {
		w.drop(DropOversized)
		return
	}
	to, from := MAC(head[wire.HeaderLen:]), MAC(head[wire.HeaderLen+6:])
	kind := binary.BigEndian.Uint16(head[wire.HeaderLen+12:])
	if from != w.cfg.MAC || to[0]&1 == 0 && to != w.cfg.GatewayMAC {
		w.drop(DropForeign)
		return
	}
	p := packet{in: in, i: i, segmented: h.Segmented()}
	switch kind {
	case typeARP:
		w.arp(data)
	case typeVLAN, typeQinQ:
		w.drop(DropVLAN)
	case typeIPv4:
		if why, ok := p.parse4(data); !ok {
			w.drop(why)
		} else {
			w.packet(&p, to[0]&1 != 0)
		}
	case typeIPv6:
		if !w.cfg.Address6.IsValid() {
			w.drop(DropEtherType)
		} else if why, ok := p.parse6(data); !ok {
			w.drop(why)
		} else {
			w.packet(&p, to[0]&1 != 0)
		}
	default:
		w.drop(DropEtherType)
	}
}

func (p *packet) parse4(b []byte) (Drop, bool) {
	if len(b) < header.IPv4MinimumSize || b[0]>>4 != 4 {
		return DropMalformed, false
	}
	size := int(binary.BigEndian.Uint16(b[2:]))
	headers := int(b[0]&15) * 4
	if headers < header.IPv4MinimumSize || size < headers || size > len(b) {
		return DropMalformed, false
	}
	if headers != header.IPv4MinimumSize {
		return DropOptions, false
	}
	if binary.BigEndian.Uint16(b[6:])&0x3fff != 0 { // more fragments follow, or this one has an offset
		return DropFragment, false
	}
	p.all, p.payload = b[:size], b[headers:size]
	p.from, p.to = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
	p.protocol = b[9]
	return 0, true
}

func (p *packet) parse6(b []byte) (Drop, bool) {
	if len(b) < header.IPv6MinimumSize || b[0]>>4 != 6 {
		return DropMalformed, false
	}
	size := header.IPv6MinimumSize + int(binary.BigEndian.Uint16(b[4:]))
	if size > len(b) {
		return DropMalformed, false
	}
	p.all, p.payload = b[:size], b[header.IPv6MinimumSize:size]
	p.from, p.to = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
	switch p.protocol = b[6]; p.protocol {
	case 44:
		return DropFragment, false
	case 0, 43, 50, 51, 60, 135, 139, 140, 253, 254: // IANA's list of extension headers
		return DropOptions, false
	}
	return 0, true
}

func (w *Wire) isInside(a netip.Addr) bool {
	return a == w.cfg.Address || a.Is6() && a == w.cfg.Address6
}

func (w *Wire) isGateway(a netip.Addr) bool {
	return a == w.cfg.Gateway || a.Is6() && a == w.cfg.Gateway6
}

// isResolver says whether DNS is served at an address. The Outside refuses
// connections to the gateway's other ports, and logs them.
func (w *Wire) isResolver(to netip.AddrPort) bool {
	return to.Port() == portDNS && w.isGateway(to.Addr())
}

// packet handles an IP packet. group says whether its frame went to a group of MACs.
func (w *Wire) packet(p *packet, group bool) {
	if p.protocol == protocolICMPv6 && p.to.Is6() && w.neighbour(p) {
		return
	}
	switch {
	case group || p.to.IsMulticast() || p.to == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		w.drop(DropMulticast)
		return
	case !w.isInside(p.from):
		w.drop(DropSpoofed)
		return
	case martian(p.to) || w.isInside(p.to):
		w.drop(DropMartian)
		return
	}
	switch {
	case p.protocol == uint8(TCP):
		w.segment(p)
	case p.protocol == uint8(UDP) && !p.segmented:
		w.datagram(p)
	case !p.segmented && w.isGateway(p.to) && (p.to.Is4() && p.protocol == protocolICMP || p.to.Is6() && p.protocol == protocolICMPv6):
		w.echo(p)
	default:
		w.drop(DropProtocol)
	}
}

// martian reports whether a is an address that no packet on a wire can have as its
// destination. Policies need not know such addresses. netstack would not answer them
// either.
func martian(a netip.Addr) bool {
	return a.IsUnspecified() || a.IsLoopback() || a.Is4In6() || a.Is4() && a.As4()[0] == 0
}

// segment handles a TCP segment. A segment of a connection goes to netstack, a first
// segment makes the Outside dial, and any other is reset.
func (w *Wire) segment(p *packet) {
	if len(p.payload) < header.TCPMinimumSize {
		w.drop(DropMalformed)
		return
	}
	tcp := header.TCP(p.payload)
	if offset := int(tcp.DataOffset()); offset < header.TCPMinimumSize || offset > len(tcp) ||
		tcp.SourcePort() == 0 || tcp.DestinationPort() == 0 {
		w.drop(DropMalformed)
		return
	}
	t := Tuple{
		TCP,
		netip.AddrPortFrom(p.from, tcp.SourcePort()),
		netip.AddrPortFrom(p.to, tcp.DestinationPort()),
	}
	flags := tcp.Flags()

	w.mu.Lock()
	c := w.conns[t]
	if c != nil && c.stack != nil {
		stack := c.stack
		w.mu.Unlock()
		headers := len(p.all) - len(p.payload) + int(tcp.DataOffset())
		stack.deliver(p.to.Is6(), p.in.take(p.i, headers, len(p.all)))
		return
	}
	defer w.mu.Unlock()
	switch first := flags&(header.TCPFlagSyn|header.TCPFlagAck|header.TCPFlagRst|header.TCPFlagFin) == header.TCPFlagSyn; {
	case c != nil && flags&header.TCPFlagRst != 0:
		c.cancel() // the sandbox has given up while we were dialling
	case c != nil || flags&header.TCPFlagRst != 0:
		w.drop(DropStray) // the SYN again, or a RST for an unknown connection
	case !first:
		w.answer(w.resetFor(p.all))
	default:
		w.open(t, p.all)
	}
}
