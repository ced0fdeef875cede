package stack

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/header"

	"agentrun.dev/internal/network/networktest"
	"agentrun.dev/internal/network/wire"
)

// hostile is a sandbox that writes its own frames.
type hostile struct {
	*os.File
	w *Wire
}

func newHostile(t testing.TB, o Outside, change ...func(*Config)) *hostile {
	t.Helper()
	near, far := networktest.NewWire(t)
	return &hostile{near, attachEnd(t, newPoller(t), far, o, change...)}
}

// sent makes frames as the sandbox would.
var sent = &Wire{cfg: Config{MAC: config.GatewayMAC, GatewayMAC: config.MAC, Gateway6: config.Address6}}

func addrPort(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func tcpFrame(from, to string, f header.TCPFields) []byte {
	return sent.newSegment(addrPort(from), addrPort(to), f)
}

func udpFrame(from, to, data string) []byte {
	return sent.newDatagram(addrPort(from), addrPort(to), []byte(data))
}

// with changes bytes of a message. at is their offset after the head.
func with(m []byte, at int, values ...byte) []byte {
	m = append([]byte{}, m...)
	copy(m[headLen+at:], values)
	return m
}

func withHead(m []byte, at int, values ...byte) []byte {
	m = append([]byte{}, m...)
	copy(m[at:], values)
	return m
}

const (
	me4, me6       = "10.255.255.2:1000", "[fd00:a9e7::2]:1000"
	other4, other6 = "203.0.113.5:80", "[2001:db8::5]:80"
)

func arpFrame(senderMAC MAC, sender, target netip.Addr) []byte {
	m, b := sent.newMessage(typeARP, header.ARPSize)
	copy(m[wire.HeaderLen:], []byte{255, 255, 255, 255, 255, 255})
	a := header.ARP(b)
	a.SetIPv4OverEthernet()
	a.SetOp(header.ARPRequest)
	copy(a.HardwareAddressSender(), senderMAC[:])
	copy(a.ProtocolAddressSender(), sender.AsSlice())
	copy(a.ProtocolAddressTarget(), target.AsSlice())
	return m
}

func solicitation(from, target netip.Addr) []byte {
	to := netip.MustParseAddr("ff02::1:ff00:1")
	m, b := sent.newPacket(from, to, protocolICMPv6, header.ICMPv6NeighborSolicitMinimumSize)
	copy(m[wire.HeaderLen:], []byte{0x33, 0x33, 0xff, 0, 0, 1})
	header.IPv6(m[headLen:]).SetHopLimit(255)
	b[0] = byte(header.ICMPv6NeighborSolicit)
	copy(b[8:], target.AsSlice())
	return m
}

// TestDropped sends messages that are not served. It expects the right reason and no
// answer.
func TestDropped(t *testing.T) {
	syn := header.TCPFields{Flags: header.TCPFlagSyn, WindowSize: 1000}
	good4, good6 := tcpFrame(me4, other4, syn), tcpFrame(me6, other6, syn)
	udp4 := udpFrame(me4, other4, "hello")
	address := netip.MustParseAddr
	for _, test := range []struct {
		name    string
		message []byte
		why     Drop
	}{
		{"nothing", []byte{}, DropMalformed},
		{"half a header", good4[:5], DropMalformed},
		{"no Ethernet header", good4[:wire.HeaderLen+13], DropMalformed},
		{"half an IP header", good4[:headLen+10], DropMalformed},
		{"an IP header only", with(good4[:headLen+20], 2, 0, 20), DropMalformed},
		{"half a TCP header", with(good4[:headLen+30], 2, 0, 30), DropMalformed},
		{"a TCP header longer than the packet", with(good4, 20+12, 0xf0), DropMalformed},
		{"a TCP header shorter than one", with(good4, 20+12, 0x10), DropMalformed},
		{"a length beyond the frame", with(good4, 2, 0xff, 0xff), DropMalformed},
		{"a length below the header", with(good4, 2, 0, 19), DropMalformed},
		{"IPv6 with a length beyond the frame", with(good6, 4, 0xff, 0xff), DropMalformed},
		{"version 5", with(good4, 0, 0x55), DropMalformed},
		{"IPv4 in a frame of IPv6", withHead(good4, wire.HeaderLen+12, 0x86, 0xdd), DropMalformed},
		{"longer than a wire's messages", append(good4, make([]byte, 1<<16)...), DropMalformed},
		{"an unknown GSO type", withHead(good4, 1, 3), DropMalformed},
		{"a checksum behind the end", withHead(good4, 0, 1, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0), DropMalformed},
		{"unknown flags", withHead(good4, 0, 0x80), DropMalformed},
		{"port 0 as source", with(good4, 20, 0, 0), DropMalformed},
		{"port 0 as destination", with(good4, 22, 0, 0), DropMalformed},
		{"a UDP length beyond the packet", with(udp4, 24, 0xff, 0xff), DropMalformed},
		{"a UDP length below the header", with(udp4, 24, 0, 7), DropMalformed},
		{"DNS without a header", udpFrame(me4, "10.255.255.1:53", "short"), DropMalformed},
		{"a foreign source MAC", withHead(good4, wire.HeaderLen+6, 2, 0, 0, 0, 0, 9), DropForeign},
		{"a foreign destination MAC", withHead(good4, wire.HeaderLen, 2, 0, 0, 0, 0, 9), DropForeign},
		{"a group as source MAC", withHead(good4, wire.HeaderLen+6, 3), DropForeign},
		{"a VLAN tag", withHead(good4, wire.HeaderLen+12, 0x81, 0), DropVLAN},
		{"two VLAN tags", withHead(good4, wire.HeaderLen+12, 0x88, 0xa8), DropVLAN},
		{"LLDP", withHead(good4, wire.HeaderLen+12, 0x88, 0xcc), DropEtherType},
		{"a length as type", withHead(good4, wire.HeaderLen+12, 0, 40), DropEtherType},
		{"TCP in a broadcast frame", withHead(good4, wire.HeaderLen, 255, 255, 255, 255, 255, 255), DropMulticast},
		{"mDNS", udpFrame(me4, "224.0.0.251:5353", "x"), DropMulticast},
		{"IPv6 multicast", udpFrame(me6, "[ff02::fb]:5353", "x"), DropMulticast},
		{"DHCP", udpFrame(me4, "255.255.255.255:67", "x"), DropMulticast},
		{"IP options", with(good4, 0, 0x46), DropOptions},
		{"IPv6 hop-by-hop options", with(good6, 6, 0), DropOptions},
		{"an IPv6 routing header", with(good6, 6, 43), DropOptions},
		{"IPv6 destination options", with(good6, 6, 60), DropOptions},
		{"a first fragment", with(good4, 6, 0x20, 0), DropFragment},
		{"a last fragment", with(good4, 6, 0, 5), DropFragment},
		{"an IPv6 fragment", with(good6, 6, 44), DropFragment},
		{"another source address", tcpFrame("10.255.255.3:1000", other4, syn), DropSpoofed},
		{"the gateway's address", tcpFrame("10.255.255.1:1000", other4, syn), DropSpoofed},
		{"another IPv6 source", tcpFrame("[2001:db8::9]:1000", other6, syn), DropSpoofed},
		{"a link-local source", tcpFrame("[fe80::1]:1000", other6, syn), DropSpoofed},
		{"another UDP source", udpFrame("192.0.2.1:1000", other4, "x"), DropSpoofed},
		{"loopback", tcpFrame(me4, "127.0.0.1:80", syn), DropMartian},
		{"IPv6 loopback", tcpFrame(me6, "[::1]:80", syn), DropMartian},
		{"0.0.0.0", tcpFrame(me4, "0.0.0.0:80", syn), DropMartian},
		{"0.1.2.3", tcpFrame(me4, "0.1.2.3:80", syn), DropMartian},
		{"::", tcpFrame(me6, "[::]:80", syn), DropMartian},
		{"itself", tcpFrame(me4, me4, syn), DropMartian},
		{"IPv4 in IPv6", with(good6, 24, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 169, 254, 169, 254), DropMartian},
		{"SCTP", with(good4, 9, 132), DropProtocol},
		{"GRE", with(good4, 9, 47), DropProtocol},
		{"IPv4 in IPv4", with(good4, 9, 4), DropProtocol},
		{"a ping of others", with(good4, 9, 1), DropProtocol},
		{"ICMP to the gateway that is no ping", with(with(tcpFrame(me4, "10.255.255.1:80", syn), 9, 1), 20, 13), DropProtocol},
		{"a RST of no connection", tcpFrame(me4, other4, header.TCPFields{Flags: header.TCPFlagRst}), DropStray},
		{"ARP for others", arpFrame(config.MAC, config.Address, address("10.255.255.9")), DropProtocol},
		{"ARP of another MAC", arpFrame(config.GatewayMAC, config.Address, config.Gateway), DropSpoofed},
		{"ARP of another address", arpFrame(config.MAC, address("10.255.255.3"), config.Gateway), DropSpoofed},
		{"half an ARP", arpFrame(config.MAC, config.Address, config.Gateway)[:headLen+20], DropMalformed},
		{"duplicate address detection", solicitation(address("::"), config.Address6), DropProtocol},
		{"a solicitation of others", solicitation(config.Address6, address("fd00:a9e7::9")), DropProtocol},
		{"a solicitation by others", solicitation(address("2001:db8::1"), config.Gateway6), DropSpoofed},
		{"a solicitation from afar", with(solicitation(config.Address6, config.Gateway6), 7, 64), DropMalformed},
		{"a router solicitation", with(solicitation(config.Address6, config.Gateway6), 40, 133), DropProtocol},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newHostile(t, &loopback{})
			if _, err := h.Write(test.message); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the frame was read", func() bool { return h.w.Stats().FramesIn == 1 })
			eventually(t, "it was dropped", func() bool { return len(h.w.Stats().Dropped) > 0 })
			s := h.w.Stats()
			if s.Dropped[test.why] != 1 || len(s.Dropped) != 1 {
				t.Errorf("dropped %v, want %v", s.Dropped, test.why)
			}
			if s.FramesOut != 0 || s.Connections != 0 || s.Flows != 0 || s.Stack {
				t.Errorf("it had an effect: %+v", s)
			}
		})
	}
}

// TestAnswers sends messages that are answered by hand.
func TestAnswers(t *testing.T) {
	h := newHostile(t, &loopback{})
	for _, test := range []struct {
		name    string
		message []byte
		check   func(b []byte) bool
	}{
		{"ARP", arpFrame(config.MAC, config.Address, config.Gateway), func(b []byte) bool {
			a := header.ARP(b)
			return a.IsValid() && a.Op() == header.ARPReply && MAC(a.HardwareAddressSender()) == config.GatewayMAC
		}},
		{"an ARP probe", arpFrame(config.MAC, netip.MustParseAddr("0.0.0.0"), config.Gateway), func(b []byte) bool {
			return header.ARP(b).Op() == header.ARPReply
		}},
		{"a neighbour solicitation", solicitation(config.Address6, config.Gateway6), func(b []byte) bool {
			return b[6] == protocolICMPv6 && b[40] == byte(header.ICMPv6NeighborAdvert) && MAC(b[40+26:]) == config.GatewayMAC
		}},
		{"a solicitation from a link-local address", solicitation(netip.MustParseAddr("fe80::2"), config.Gateway6), func(b []byte) bool {
			return b[40] == byte(header.ICMPv6NeighborAdvert) && b[24] == 0xfe
		}},
		{"a segment of no connection", tcpFrame(me4, other4, header.TCPFields{Flags: header.TCPFlagAck, SeqNum: 5, AckNum: 77}), func(b []byte) bool {
			tcp := header.TCP(b[20:])
			return tcp.Flags() == header.TCPFlagRst && tcp.SequenceNumber() == 77
		}},
		{"a FIN of no connection", tcpFrame(me6, other6, header.TCPFields{Flags: header.TCPFlagFin, SeqNum: 5}), func(b []byte) bool {
			tcp := header.TCP(b[40:])
			return tcp.Flags() == header.TCPFlagRst|header.TCPFlagAck && tcp.AckNumber() == 6
		}},
		{"UDP to the gateway", udpFrame(me4, "10.255.255.1:54", "x"), func(b []byte) bool {
			return b[9] == protocolICMP && b[20] == 3 && b[21] == 3
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if _, err := h.Write(test.message); err != nil {
				t.Fatal(err)
			}
			h.SetReadDeadline(time.Now().Add(patience))
			b := make([]byte, 2000)
			n, err := h.Read(b)
			if err != nil {
				t.Fatal(err)
			}
			if MAC(b[wire.HeaderLen:]) != config.MAC || MAC(b[wire.HeaderLen+6:]) != config.GatewayMAC || !test.check(b[headLen:n]) {
				t.Errorf("answer %x", b[:n])
			}
		})
	}
}

// TestNoReader: a sandbox that sends and never reads costs no more than a bounded
// queue. Its wire goes on when it reads again.
func TestNoReader(t *testing.T) {
	h := newHostile(t, &loopback{})
	ping := arpFrame(config.MAC, config.Address, config.Gateway)
	eventually(t, "answers are dropped", func() bool {
		for range 100 {
			if _, err := h.Write(ping); err != nil {
				t.Fatal(err)
			}
		}
		return h.w.Stats().Dropped[DropFull] > 0
	})
	h.w.tx.mu.Lock()
	waiting := len(h.w.tx.answers)
	h.w.tx.mu.Unlock()
	if waiting > maxAnswers {
		t.Errorf("%d answers wait", waiting)
	}
	b := make([]byte, 2000)
	h.SetReadDeadline(time.Now().Add(patience))
	for before := h.w.Stats().FramesOut; h.w.Stats().FramesOut == before; {
		if _, err := h.Read(b); err != nil {
			t.Fatal(err)
		}
	}
}

// sink is an Outside that accepts everything.
type sink struct{}

type sinkRemote struct{}

func (sinkRemote) Splice(inside Conn) {
	io.Copy(inside, inside)
	inside.Close()
}
func (sinkRemote) Close() error { return nil }

func (sink) DialTCP(_ context.Context, _, to netip.AddrPort) (Remote, error) {
	if to.Port()%7 == 0 {
		return nil, ErrUnreachable
	}
	return sinkRemote{}, nil
}

func (sink) DialUDP(ctx context.Context, _, to netip.AddrPort) (net.Conn, error) {
	if to.Port()%3 == 0 {
		return nil, errors.New("no")
	}
	a, b := net.Pipe()
	context.AfterFunc(ctx, func() { b.Close() })
	go io.Copy(b, b)
	return a, nil
}

func (sink) ServeDNS(_ context.Context, q []byte, _ bool) []byte { return q }

// FuzzFrames feeds a wire with a sequence of messages, each after its length.
func FuzzFrames(f *testing.F) {
	join := func(messages ...[]byte) (all []byte) {
		for _, m := range messages {
			all = append(binary.BigEndian.AppendUint16(all, uint16(len(m))), m...)
		}
		return all
	}
	syn := header.TCPFields{Flags: header.TCPFlagSyn, SeqNum: 1, WindowSize: 1000}
	ack := header.TCPFields{Flags: header.TCPFlagAck, SeqNum: 2, AckNum: 9, WindowSize: 1000}
	fin := header.TCPFields{Flags: header.TCPFlagFin | header.TCPFlagAck, SeqNum: 2, AckNum: 9}
	rst := header.TCPFields{Flags: header.TCPFlagRst, SeqNum: 2}
	f.Add(join(tcpFrame(me4, other4, syn), tcpFrame(me4, other4, ack), tcpFrame(me4, other4, fin), tcpFrame(me4, other4, rst)))
	f.Add(join(tcpFrame(me6, other6, syn), tcpFrame(me6, other6, syn), tcpFrame(me6, other6, rst)))
	f.Add(join(tcpFrame(me4, "203.0.113.5:77", syn), tcpFrame(me4, "10.255.255.1:53", syn), tcpFrame(me4, "10.255.255.1:22", syn)))
	f.Add(join(udpFrame(me4, other4, "x"), udpFrame(me4, "203.0.113.5:9", "y"), udpFrame(me6, "[fd00:a9e7::1]:53", "a query of bytes")))
	f.Add(join(arpFrame(config.MAC, config.Address, config.Gateway), solicitation(config.Address6, config.Gateway6)))
	f.Add(join(with(tcpFrame(me4, other4, syn), 6, 0x20, 0), with(tcpFrame(me6, other6, syn), 6, 44), with(tcpFrame(me4, other4, syn), 0, 0x4f)))
	f.Add(join(with(tcpFrame(me4, "10.255.255.1:80", syn), 9, 1), with(tcpFrame(me4, "10.255.255.1:80", syn), 20, 8), []byte{}))

	h := newHostile(f, sink{}, func(c *Config) {
		c.Limits = Limits{Connections: 32, Opening: 8, Flows: 16, Queries: 8, FlowIdle: time.Millisecond, Linger: time.Millisecond, Buffers: 1 << 20}
	})
	go io.Copy(io.Discard, h.File)
	in := newInput()
	f.Fuzz(func(t *testing.T, all []byte) {
		for len(all) >= 2 {
			n := min(int(binary.BigEndian.Uint16(all)), len(all)-2)
			m := all[2 : 2+n]
			all = all[2+n:]
			copy(in.heads[0][:], m)
			if n > headLen {
				copy(in.packets[0].AsSlice(), m[headLen:])
			}
			in.headers[0].len = uint32(n)
			h.w.frame(in, 0)
		}
		h.w.mu.Lock()
		defer h.w.mu.Unlock()
		if len(h.w.conns) > 32 || len(h.w.flows) > 16 || h.w.queries > 8 || h.w.buffers > 1<<20 {
			t.Errorf("%d connections, %d flows, %d queries, %d bytes of buffers", len(h.w.conns), len(h.w.flows), h.w.queries, h.w.buffers)
		}
	})
}
