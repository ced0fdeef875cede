package stack

import (
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"agentrun.dev/internal/network/wire"
)

const (
	nic tcpip.NICID = 1
	// minBuffer and maxBuffer bound the size of each of a connection's two buffers.
	minBuffer = 16 << 10
	maxBuffer = 1 << 20
	// bufferShare is the inverse of the share of the remaining room that a new
	// connection gets.
	bufferShare = 64
	// startBuffer is the receive buffer during the handshake.
	startBuffer = 64 << 10
)

// netstack is gVisor's TCP/IP stack for the connections of one sandbox. It handles
// only TCP. Everything else on the wire is answered by hand.
type netstack struct {
	w     *Wire
	stack *stack.Stack
	link  *link
}

// newNetstack makes a stack that accepts every address as its own.
func newNetstack(w *Wire) *netstack {
	n := &netstack{w: w}
	n.link = &link{w: w, stack: n}
	n.stack = stack.New(stack.Options{
		NetworkProtocols: []stack.NetworkProtocolFactory{
			ipv4.NewProtocol,
			ipv6.NewProtocolWithOptions(ipv6.Options{}),
		},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol},
		Clock:              w.clock,
	})
	n.setOptions()
	// The forwarder comes before the interface. Otherwise SYNs would be reset.
	forwarder := tcp.NewForwarder(n.stack, startBuffer, w.cfg.Limits.Connections+1, w.forwarded)
	n.stack.SetTransportProtocolHandler(tcp.ProtocolNumber, func(id stack.TransportEndpointID, p *stack.PacketBuffer) bool {
		return w.offer(forwarder, id, p)
	})
	// These calls fail only if the interface exists already or not at all.
	must(n.stack.CreateNIC(nic, n.link))
	must(n.stack.SetPromiscuousMode(nic, true))
	must(n.stack.SetSpoofing(nic, true))
	n.stack.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4EmptySubnet, NIC: nic},
		{Destination: header.IPv6EmptySubnet, NIC: nic},
	})
	return n
}

func must(err tcpip.Error) {
	if err != nil {
		panic("network/stack: " + err.String())
	}
}

func (n *netstack) setOptions() {
	// The handshake announces a window scale for the largest buffer, not for
	// startBuffer. Otherwise no window could exceed 128 KiB. Once the size of a
	// connection's buffers is set, netstack does not change them.
	moderate := tcpip.TCPModerateReceiveBufferOption(true)
	sack := tcpip.TCPSACKEnabled(true)
	// The wire neither loses nor reorders frames, so a late answer means that the
	// sandbox has not run, as on a busy host. RACK and its probes would take that for
	// a loss, retransmit segments that are on the way, and shrink the window.
	recovery := tcpip.TCPRecovery(0)
	// The wire neither loses nor reorders frames, so no segment of a connection comes
	// late.
	timeWait := tcpip.TCPTimeWaitTimeoutOption(0)
	receive := tcpip.TCPReceiveBufferSizeRangeOption{Min: minBuffer, Default: startBuffer, Max: maxBuffer}
	send := tcpip.TCPSendBufferSizeRangeOption{Min: minBuffer, Default: startBuffer, Max: maxBuffer}
	linger := tcpip.TCPLingerTimeoutOption(n.w.cfg.Limits.Linger)
	// 31 seconds for the sandbox to complete a handshake.
	retries := tcpip.TCPSynRetriesOption(4)
	// A sandbox whose program does not read is probed this often, so that linger
	// hears from it in time.
	probe := tcpip.TCPMaxRTOOption(min(20*time.Second, n.w.cfg.Limits.Linger/3))
	fastest := tcpip.TCPMinRTOOption(min(tcp.MinRTO, time.Duration(probe)))
	for _, o := range []tcpip.SettableTransportProtocolOption{&moderate, &sack, &recovery, &timeWait, &receive, &send, &linger, &retries, &fastest, &probe} {
		must(n.stack.SetTransportProtocolOption(tcp.ProtocolNumber, o))
	}
}

// deliver hands an IP packet to the stack, which then owns it.
func (n *netstack) deliver(six bool, packet buffer.Buffer) {
	protocol := header.IPv4ProtocolNumber
	if six {
		protocol = header.IPv6ProtocolNumber
	}
	p := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: packet})
	defer p.DecRef()
	n.link.dispatcher.DeliverNetworkPacket(protocol, p)
}

// abort ends a handshake.
func (n *netstack) abort(t Tuple) {
	protocol := header.IPv4ProtocolNumber
	if t.Inside.Addr().Is6() {
		protocol = header.IPv6ProtocolNumber
	}
	id := stack.TransportEndpointID{
		LocalAddress: tcpip.AddrFromSlice(t.Outside.Addr().AsSlice()), LocalPort: t.Outside.Port(),
		RemoteAddress: tcpip.AddrFromSlice(t.Inside.Addr().AsSlice()), RemotePort: t.Inside.Port(),
	}
	if e := n.stack.FindTransportEndpoint(protocol, tcp.ProtocolNumber, id, nic); e != nil {
		e.Abort()
	}
}

// destroy ends the stack and waits for its goroutines.
func (n *netstack) destroy() { n.stack.Destroy() }

func tupleOf(id stack.TransportEndpointID) Tuple {
	return Tuple{TCP, netip.AddrPortFrom(addressOf(id.RemoteAddress), id.RemotePort), netip.AddrPortFrom(addressOf(id.LocalAddress), id.LocalPort)}
}

func addressOf(a tcpip.Address) netip.Addr {
	addr, _ := netip.AddrFromSlice(a.AsSlice())
	return addr
}

// link is netstack's view of the wire. It needs no neighbour discovery: all frames go
// from the gateway's MAC to the sandbox's.
type link struct {
	w     *Wire
	stack *netstack
	// dispatcher is set while the interface is made, and stays.
	dispatcher stack.NetworkDispatcher
}

var (
	_ stack.LinkEndpoint = (*link)(nil)
	_ stack.GSOEndpoint  = (*link)(nil)
)

func (l *link) MTU() uint32                             { return uint32(l.w.cfg.MTU) }
func (l *link) SetMTU(uint32)                           {}
func (l *link) MaxHeaderLength() uint16                 { return 0 }
func (l *link) LinkAddress() tcpip.LinkAddress          { return "" }
func (l *link) SetLinkAddress(tcpip.LinkAddress)        {}
func (l *link) IsAttached() bool                        { return l.dispatcher != nil }
func (l *link) Wait()                                   {}
func (l *link) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareEther }
func (l *link) AddHeader(*stack.PacketBuffer)           {}
func (l *link) ParseHeader(*stack.PacketBuffer) bool    { return true }
func (l *link) Close()                                  {}
func (l *link) SetOnCloseAction(func())                 {}
func (l *link) SupportedGSO() stack.SupportedGSO        { return stack.HostGSOSupported }

// GSOMaxSize is the largest packet. With 65536 netstack would make packets that are
// too long for the length field of an IP header.
func (l *link) GSOMaxSize() uint32 { return 65535 }

// Capabilities says that checksums of received packets need no check. It does not say
// that checksums of sent packets can be omitted: netstack would then send segments
// without data with a checksum of zero, which would go unnoticed.
func (l *link) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityRXChecksumOffload
}

func (l *link) Attach(d stack.NetworkDispatcher) {
	if d != nil { // a stack that ends may still get packets, which it ignores
		l.dispatcher = d
	}
}

// WritePackets sends packets, and waits while the wire is full. Only goroutines of
// this stack call it, never a poller.
func (l *link) WritePackets(list stack.PacketBufferList) (int, tcpip.Error) {
	n := 0
	for _, p := range list.AsSlice() {
		if p.TransportProtocolNumber == tcp.ProtocolNumber {
			l.write(p)
		}
		n++
	}
	return n, nil
}

func (l *link) write(p *stack.PacketBuffer) {
	var h wire.Header
	if g := p.GSOOptions; g.Type != stack.GSONone {
		if g.NeedsCsum {
			h.Flags = wire.NeedsChecksum
			h.ChecksumStart, h.ChecksumOffset = wire.EthernetLen+g.L3HdrLen, g.CsumOffset
		}
		if p.Data().Size() > int(g.MSS) {
			h.SegmentSize = g.MSS
			h.HeadersLen = wire.EthernetLen + uint16(p.HeaderSize())
			h.GSO = wire.GSOTCPv4
			if g.Type == stack.GSOTCPv6 {
				h.GSO = wire.GSOTCPv6
			}
		}
	}
	kind := uint16(typeIPv4)
	if p.NetworkProtocolNumber == header.IPv6ProtocolNumber {
		kind = typeIPv6
	}
	var head [headLen]byte
	l.w.putHead(head[:], h, kind)

	var room [8]unix.Iovec
	vectors := append(room[:0], unix.Iovec{Base: &head[0]})
	vectors[0].SetLen(len(head))
	for _, b := range p.AsSlices() {
		if len(b) > 0 {
			v := unix.Iovec{Base: &b[0]}
			v.SetLen(len(b))
			vectors = append(vectors, v)
		}
	}
	l.w.transmit(vectors, headLen+p.Size())
	if l.w.ctx.Err() != nil && header.TCP(p.TransportHeader().Slice()).Flags()&header.TCPFlagSyn != 0 {
		l.abandon(p)
	}
}

// abandon ends the handshake that p answers. Close ends the handshakes that it finds.
// This one has begun since, and would go on for a minute. Its connection's goroutine
// runs, so Close waits for the goroutine started here, too.
func (l *link) abandon(p *stack.PacketBuffer) {
	ip, ports := p.Network(), header.TCP(p.TransportHeader().Slice())
	t := Tuple{
		TCP,
		netip.AddrPortFrom(addressOf(ip.DestinationAddress()), ports.DestinationPort()),
		netip.AddrPortFrom(addressOf(ip.SourceAddress()), ports.SourcePort()),
	}
	l.w.running.Add(1)
	go func() {
		defer l.w.running.Done()
		l.stack.abort(t)
	}()
}
