// Package stack owns the far end of a sandbox's wire. It turns the sandbox's frames
// into TCP connections and UDP flows, and hands these to an Outside, which decides
// where they lead. Policies are not its concern.
//
// # What a wire serves
//
//   - ARP and neighbour solicitations for the gateway are answered by hand, and so
//     is ICMP echo to the gateway.
//   - TCP: the Outside dials first, and only then is the sandbox's SYN answered, so
//     that a refused connection is ECONNREFUSED inside, an unreachable one
//     EHOSTUNREACH. Established connections run in gVisor's netstack.
//   - UDP: one flow per pair of addresses, by hand.
//   - DNS on port 53 of the gateway, over UDP and TCP.
//
// Everything else is dropped and counted (Drop): frames with a foreign source MAC or
// address, VLAN tags, multicast, IP options, extension headers, fragments in either
// direction, other protocols. Datagrams from outside that do not fit into the MTU are
// dropped, too, because they are not fragmented. The checksums of a sandbox's packets
// are not verified, since its kernel leaves most of them to the device.
//
// # What a wire costs
//
// A Poller serves all wires of a process with one epoll and a few goroutines. An idle
// wire is only a Wire. Its netstack is made for the first connection that its Outside
// has dialled, and freed some time after the last one has ended. It has one goroutine
// per GOMAXPROCS, so a process with many wires should cap that.
//
// # Waiting
//
// A full wire drops no segments. They wait inside netstack, which in turn stops
// reading from the outside. Pollers never wait: the frames that they answer by hand
// queue up to a bound.
package stack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
)

// An Outside returns these errors for a connection that was not made. The sandbox
// learns of any other error as ErrUnreachable.
var (
	// ErrRefused becomes a RST: ECONNREFUSED inside.
	ErrRefused = errors.New("connection refused")
	// ErrUnreachable becomes ICMP host unreachable: EHOSTUNREACH inside.
	ErrUnreachable = errors.New("host unreachable")
)

// Outside decides where the connections of a sandbox lead. Its methods are called
// from many goroutines. They return soon after their ctx has ended.
type Outside interface {
	// DialTCP is called for each connection that the sandbox opens, before its
	// handshake is answered.
	DialTCP(ctx context.Context, from, to netip.AddrPort) (Remote, error)
	// DialUDP is called for the first datagram of each pair of addresses, except for
	// port 53 of the gateway. The sandbox learns of an error as ICMP port
	// unreachable.
	DialUDP(ctx context.Context, from, to netip.AddrPort) (net.Conn, error)
	// ServeDNS answers one DNS message that was sent to the gateway's port 53. It
	// returns nil for messages that get no answer.
	ServeDNS(ctx context.Context, query []byte, tcp bool) (answer []byte)
}

// Remote is an open connection to the outside.
type Remote interface {
	// Splice moves bytes both ways between the outside and the sandbox's connection
	// until both directions have ended. It may look at the first bytes before it
	// sends any. When it returns, the outside's connection is closed.
	Splice(inside Conn)
	// Close ends the connection at once, with a RST rather than a FIN, because the
	// data sent so far may be incomplete. It is called when the handshake with the
	// sandbox fails, when the connection is cut while Splice runs, and again after
	// Splice.
	Close() error
}

// Conn is the sandbox's side of a connection.
type Conn interface {
	net.Conn
	// CloseWrite sends a FIN: the sandbox reads the end of the stream.
	CloseWrite() error
	// Reset ends the connection with a RST: ECONNRESET inside. It does not wait, even
	// if the sandbox does not read.
	Reset() error
	// Reserve takes bytes of the memory that all connections of the process share. A
	// Remote calls it to keep more of a connection than Splice does. ok is false if
	// too little memory is left.
	Reserve(bytes int) (release func(), ok bool)
}

// Protocol is the transport protocol of a Tuple, by its IP protocol number.
type Protocol uint8

// The protocols that sandboxes speak.
const (
	TCP Protocol = 6
	UDP Protocol = 17
)

// Tuple identifies one connection of a sandbox, or one UDP flow.
type Tuple struct {
	Protocol        Protocol
	Inside, Outside netip.AddrPort
}

func (t Tuple) String() string {
	name := "tcp"
	if t.Protocol == UDP {
		name = "udp"
	}
	return fmt.Sprintf("%s %s → %s", name, t.Inside, t.Outside)
}

// MAC is an Ethernet address.
type MAC [6]byte

// Config holds the addresses of a wire's two ends, and the limits of its sandbox.
type Config struct {
	// MAC is the sandbox's MAC address. GatewayMAC is ours.
	MAC, GatewayMAC MAC
	// Address and Gateway are the sandbox's IPv4 address and ours; Address6 and
	// Gateway6 the same for IPv6, or invalid if the sandbox has none.
	Address, Gateway   netip.Addr
	Address6, Gateway6 netip.Addr
	// MTU is the MTU of the sandbox's interface, 1280 to 65535.
	MTU int
	// Limits are the sandbox's limits. A limit that is 0 is replaced by that of
	// DefaultLimits.
	Limits Limits
	// Clock is set by tests. nil is the real clock.
	Clock tcpip.Clock
}

// Limits bound how much one sandbox can use of the process that serves its wire.
type Limits struct {
	// Connections is the maximum number of TCP connections, including those that are
	// being dialled and those that are ending. Further connections are refused.
	Connections int
	// Opening is how many connections may be in dialling or in the sandbox's
	// handshake. The SYNs of further connections are dropped, and the sandbox's
	// kernel sends them again.
	Opening int
	// Flows is the maximum number of UDP address pairs. FlowIdle is how long a pair
	// lives without a datagram.
	Flows    int
	FlowIdle time.Duration
	// Queries is how many DNS messages may be under way at once.
	Queries int
	// Buffers is how many bytes the buffers of all TCP connections may have together,
	// apart from the 32 KiB that each connection has in any case. The first
	// connections get the largest buffers.
	Buffers int
	// Up and Down are bytes per second from and to the sandbox, including frame
	// headers.
	Up, Down int64
	// StackIdle is how long the stack is kept without a connection. Linger is how
	// long a connection that has ended outside waits for a silent sandbox.
	StackIdle, Linger time.Duration
}

// DefaultLimits are the limits of a sandbox without limits of its own. If only one
// sandbox is served, it can reach all of them at once: their memory is within the
// share of one wire (fits).
var DefaultLimits = Limits{
	Connections: 1600,
	Opening:     256,
	Flows:       512,
	FlowIdle:    60 * time.Second,
	Queries:     64,
	Buffers:     128 << 20,
	StackIdle:   5 * time.Second,
	Linger:      60 * time.Second,
	// 10 Gbit/s: more than one sandbox is able to, so that it slows down nobody who is alone,
	// and less than a fast host has, so that one sandbox does not take all of its network.
	Up:   1_250_000_000,
	Down: 1_250_000_000,
}

func (l Limits) orDefault() Limits {
	setInt := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	setDuration := func(v *time.Duration, d time.Duration) {
		if *v <= 0 {
			*v = d
		}
	}
	setInt(&l.Connections, DefaultLimits.Connections)
	setInt(&l.Opening, DefaultLimits.Opening)
	setInt(&l.Flows, DefaultLimits.Flows)
	setInt(&l.Queries, DefaultLimits.Queries)
	setInt(&l.Buffers, DefaultLimits.Buffers)
	setDuration(&l.FlowIdle, DefaultLimits.FlowIdle)
	setDuration(&l.StackIdle, DefaultLimits.StackIdle)
	setDuration(&l.Linger, DefaultLimits.Linger)
	l.Up, l.Down = ratesOrDefault(l.Up, l.Down)
	return l
}

func ratesOrDefault(up, down int64) (int64, int64) {
	if up <= 0 {
		up = DefaultLimits.Up
	}
	if down <= 0 {
		down = DefaultLimits.Down
	}
	return up, down
}

// check refuses an invalid Config.
func (c *Config) check() error {
	switch {
	case !c.Address.Is4() || !c.Gateway.Is4() || c.Address == c.Gateway:
		return fmt.Errorf("IPv4 addresses %v of the sandbox and %v of its gateway: two different ones are needed", c.Address, c.Gateway)
	case c.Address6.IsValid() != c.Gateway6.IsValid():
		return fmt.Errorf("IPv6 addresses %v of the sandbox and %v of its gateway: give both or none", c.Address6, c.Gateway6)
	case c.Address6.IsValid() && (!c.Address6.Is6() || !c.Gateway6.Is6() || c.Address6 == c.Gateway6):
		return fmt.Errorf("IPv6 addresses %v of the sandbox and %v of its gateway: two different ones are needed", c.Address6, c.Gateway6)
	case c.MTU < 1280 || c.MTU > 65535:
		return fmt.Errorf("MTU %d: 1280 to 65535 are possible", c.MTU)
	case c.MAC[0]&1 != 0 || c.GatewayMAC[0]&1 != 0 || c.MAC == c.GatewayMAC:
		return fmt.Errorf("MACs %x of the sandbox and %x of its gateway: two different ones that are no groups are needed", c.MAC, c.GatewayMAC)
	case c.Limits.Up < 0 || c.Limits.Down < 0:
		return fmt.Errorf("rates %d up and %d down: bytes per second, or 0 for the default", c.Limits.Up, c.Limits.Down)
	}
	return nil
}
