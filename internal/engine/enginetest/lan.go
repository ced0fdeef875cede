package enginetest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/network/wire"
	"golang.org/x/sys/unix"
)

// lan is the network of one sandbox, at the other end of its wire. Its gateway
// answers pings. Its DNS server gives the same answer for every name. A TCP port
// returns the bytes that it gets, on any address that is routed there. The lan
// completes checksums and segments that a sandbox leaves to its network, and leaves
// its own to the sandbox.
type lan struct {
	wire    *os.File
	answer  [4]byte // of the DNS server to every name
	stopped chan struct{}
	slow    time.Duration // wait before each message that the lan reads

	mu      sync.Mutex // protects all following fields
	names   []string   // that the sandbox asked for
	dials   []string   // addresses and ports of TCP connections
	bad     []string   // why frames were invalid
	conns   map[string]*lanConn
	longest [2]int     // payload of the longest segment from the sandbox, and to it
	partial int        // frames from the sandbox whose checksum the lan completed
	pings   int        // pings received
	echoed  int        // bytes returned
	taken   *sync.Cond // broadcast after each message
}

// Addresses and MACs of the lan.
var (
	lanMAC     = [6]byte{2, 0, 0, 0, 0, 2}
	lanGateway = netip.AddrFrom4([4]byte{10, 0, 2, 2})
	lanDNS     = netip.AddrFrom4([4]byte{10, 0, 2, 3})

	lanGateway6 = netip.MustParseAddr("fd00:a9e7::2")
	lanDNS6     = netip.MustParseAddr("fd00:a9e7::3")
)

const lanEchoPort = 7

// lanNetwork is the interface of a sandbox in a lan.
func lanNetwork() *engine.Network {
	return &engine.Network{
		MAC: [6]byte{2, 0, 0, 0, 0, 15}, MTU: 1400,
		Address: netip.MustParsePrefix("10.0.2.15/24"), Gateway: lanGateway, DNS: []netip.Addr{lanDNS, lanDNS6},
		Address6: netip.MustParsePrefix("fd00:a9e7::f/64"), Gateway6: lanGateway6,
	}
}

// newLAN makes a lan at the wire of a sandbox. Its answer to every name ends with
// number.
func newLAN(t *testing.T, sb engine.Sandbox, number byte) *lan { return newSlowLAN(t, sb, number, 0) }

// newSlowLAN makes a lan that waits for slow before each message.
func newSlowLAN(t *testing.T, sb engine.Sandbox, number byte, slow time.Duration) *lan {
	t.Helper()
	wire, err := sb.Wire()
	if err != nil {
		t.Fatal(err)
	}
	isInside(t, wire)
	l := &lan{wire: wire, answer: [4]byte{10, 9, 8, number}, stopped: make(chan struct{}), conns: map[string]*lanConn{}, slow: slow}
	l.taken = sync.NewCond(&l.mu)
	go l.serve()
	t.Cleanup(func() {
		l.end()
		for _, what := range l.bad {
			t.Errorf("a frame that no network would take: %s", what)
		}
	})
	return l
}

// end ends the lan. Another lan can take its place.
func (l *lan) end() {
	_ = l.wire.Close() // closing twice is fine
	<-l.stopped
}

// isInside checks that a wire was made in another network namespace than this
// process's. With a socket of the host's namespace, a sandbox could send to the
// host's abstract addresses.
func isInside(t *testing.T, wire *os.File) {
	t.Helper()
	raw, err := wire.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	const siocgskns = 0x894c // SIOCGSKNS of linux/sockios.h
	var ns uintptr
	var errno unix.Errno
	if err := raw.Control(func(fd uintptr) { ns, _, errno = unix.Syscall(unix.SYS_IOCTL, fd, siocgskns, 0) }); err != nil || errno != 0 {
		t.Fatal(err, errno)
	}
	f := os.NewFile(ns, "network namespace")
	defer func() { _ = f.Close() }()
	its, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	own, err := os.Stat("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	if os.SameFile(its, own) {
		t.Error("the wire was made in the host's network namespace")
	}
}

// asked returns the names that the sandbox asked for. dialed returns its connections.
func (l *lan) asked() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.names)
}

// seen returns the lan's counts of long segments and partial checksums.
func (l *lan) seen() (longest [2]int, partial int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.longest, l.partial
}

// until waits for a condition that only messages change.
func (l *lan) until(t *testing.T, what string, is func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	defer context.AfterFunc(ctx, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.taken.Broadcast()
	})()
	l.mu.Lock()
	defer l.mu.Unlock()
	for !is() {
		if ctx.Err() != nil {
			t.Fatalf("waiting until %s: %v (%d pings, %d bytes returned)", what, ctx.Err(), l.pings, l.echoed)
		}
		l.taken.Wait()
	}
}

func (l *lan) dialed() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.dials)
}

func (l *lan) serve() {
	defer close(l.stopped)
	message := make([]byte, wire.MaxMessage+1)
	for {
		time.Sleep(l.slow)
		n, err := l.wire.Read(message)
		if err != nil {
			return // closed
		}
		l.mu.Lock()
		replies, err := l.takeMessage(message[:n])
		if err != nil {
			l.bad = append(l.bad, fmt.Sprintf("%v: %x", err, message[:min(n, 100)]))
		}
		l.taken.Broadcast()
		l.mu.Unlock()
		for _, reply := range replies {
			_, _ = l.wire.Write(reply) // it waits for room; an error means that the sandbox may have gone
		}
	}
}

// takeMessage completes a message's checksum and segments, and returns the answers.
func (l *lan) takeMessage(m []byte) ([][]byte, error) {
	h, f, err := wire.Parse(m)
	if err != nil {
		return nil, err
	}
	if !h.Segmented() && len(f) > wire.EthernetLen+lanNetwork().MTU {
		return nil, errors.New("its length")
	}
	if h.Flags&wire.NeedsChecksum != 0 {
		l.partial++
		h.Complete(f) // the checksum of a long segment covers the whole segment
	}
	return l.take(h, f)
}

const (
	etherARP, etherIPv4, etherIPv6             = 0x0806, 0x0800, 0x86dd
	protoICMP, protoTCP, protoUDP, protoICMPv6 = 1, 6, 17, 58
	ipLen, ip6Len, minTransport                = 20, 40, 8
)

// take reads a frame and returns the answers.
func (l *lan) take(h wire.Header, f []byte) ([][]byte, error) {
	mac := lanNetwork().MAC
	if !bytes.Equal(f[6:12], mac[:]) {
		return nil, errors.New("it is from another device")
	}
	body := f[wire.EthernetLen:]
	switch binary.BigEndian.Uint16(f[12:]) {
	case etherARP:
		return arpReply(body), nil
	case etherIPv4:
		if len(body) < ipLen || body[0] != 0x45 || int(binary.BigEndian.Uint16(body[2:])) > len(body) {
			return nil, nil // IP options, which only IGMP uses here
		}
		if checksum(body[:ipLen]) != 0 {
			return nil, errors.New("the checksum of its header")
		}
		fragment := binary.BigEndian.Uint16(body[6:]) & 0x3fff // more fragments follow, or some came before
		p := packet{
			from: netip.AddrFrom4([4]byte(body[12:16])), to: netip.AddrFrom4([4]byte(body[16:20])),
			proto: body[9], data: body[ipLen:binary.BigEndian.Uint16(body[2:])],
		}
		if fragment != 0 {
			return nil, nil
		}
		return l.takePacket(h, p)
	case etherIPv6:
		if len(body) < ip6Len || int(binary.BigEndian.Uint16(body[4:])) > len(body)-ip6Len {
			return nil, errors.New("its length")
		}
		return l.takePacket(h, packet{
			from: netip.AddrFrom16([16]byte(body[8:24])), to: netip.AddrFrom16([16]byte(body[24:40])),
			proto: body[6], data: body[ip6Len : ip6Len+int(binary.BigEndian.Uint16(body[4:]))],
		})
	}
	return nil, nil
}

// takePacket reads a packet, which is not a fragment.
func (l *lan) takePacket(h wire.Header, p packet) ([][]byte, error) {
	switch p.proto {
	case protoICMP, protoICMPv6, protoTCP, protoUDP:
	default:
		return nil, nil // messages to IPv6 groups, behind an extension header
	}
	if len(p.data) < minTransport {
		return nil, errors.New("its length")
	}
	if p.sum() != 0 {
		return nil, errors.New("the checksum of its contents")
	}
	var replies [][]byte
	switch p.proto {
	case protoICMP, protoICMPv6:
		if p.proto == protoICMP && p.data[0] == 8 {
			l.pings++
		}
		return p.pong(), nil
	case protoUDP:
		replies = l.dns(p.data)
	case protoTCP:
		return l.tcp(h, p), nil
	}
	for i, r := range replies {
		replies[i] = p.reply(r, 0)
	}
	return replies, nil
}

// dns answers a query for an A record with the lan's address, and any other query
// with an empty answer.
func (l *lan) dns(udp []byte) [][]byte {
	q := udp[8:]
	if binary.BigEndian.Uint16(udp[2:]) != 53 || len(q) < 12 {
		return nil
	}
	var labels []string
	end := 12
	for end < len(q) && q[end] != 0 && end+1+int(q[end]) < len(q) {
		labels = append(labels, string(q[end+1:end+1+int(q[end])]))
		end += 1 + int(q[end])
	}
	if end += 5; end > len(q) {
		return nil
	}
	r := make([]byte, 8, 64)
	copy(r[0:], udp[2:4])
	copy(r[2:], udp[0:2])
	r = append(r, q[:end]...)
	message := r[8:]
	copy(message[2:12], []byte{0x81, 0x80, 0, 1, 0, 0, 0, 0, 0, 0})
	if isA := bytes.Equal(q[end-4:end], []byte{0, 1, 0, 1}); isA {
		l.names = append(l.names, strings.Join(labels, "."))
		message[7] = 1
		r = append(r, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4)
		r = append(r, l.answer[:]...)
	}
	binary.BigEndian.PutUint16(r[4:], uint16(len(r)))
	return [][]byte{r}
}
