package enginetest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"agentrun.dev/internal/engine"
	"golang.org/x/sys/unix"
)

// lan is the network of one sandbox, at the other end of its wire: a gateway
// that answers pings, a DNS server that has the same answer for every name, and
// a TCP port that returns what it gets, on any address that is routed there.
type lan struct {
	wire    *os.File
	answer  [4]byte // to every name
	stopped chan struct{}

	mu    sync.Mutex // protects all following fields
	names []string   // that were asked for
	dials []string   // addresses and ports of TCP connections
	bad   []string   // frames that no network would take
	conns map[string]*lanConn
}

// What the lan and its sandboxes are called.
var (
	lanMAC     = [6]byte{2, 0, 0, 0, 0, 2}
	lanGateway = netip.AddrFrom4([4]byte{10, 0, 2, 2})
	lanDNS     = netip.AddrFrom4([4]byte{10, 0, 2, 3})
)

const lanEchoPort = 7

// lanNetwork is the interface of a sandbox in it.
func lanNetwork() *engine.Network {
	return &engine.Network{
		MAC: [6]byte{2, 0, 0, 0, 0, 15}, MTU: 1400,
		Address: netip.MustParsePrefix("10.0.2.15/24"), Gateway: lanGateway, DNS: []netip.Addr{lanDNS},
	}
}

// newLAN makes one at the wire of a sandbox. Its answer to every name ends with
// this number.
func newLAN(t *testing.T, sb engine.Sandbox, number byte) *lan {
	t.Helper()
	wire, err := sb.Wire()
	if err != nil {
		t.Fatal(err)
	}
	isInside(t, wire)
	l := &lan{wire: wire, answer: [4]byte{10, 9, 8, number}, stopped: make(chan struct{}), conns: map[string]*lanConn{}}
	go l.serve()
	t.Cleanup(func() {
		_ = wire.Close()
		<-l.stopped
		for _, what := range l.bad {
			t.Errorf("a frame that no network would take: %s", what)
		}
	})
	return l
}

// isInside checks that a wire was made in another network namespace than this
// one: with a socket of the host's, a sandbox could send to the host's abstract
// addresses.
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

// asked are the names that were asked for, dialed the connections.
func (l *lan) asked() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.names)
}

func (l *lan) dialed() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.dials)
}

func (l *lan) serve() {
	defer close(l.stopped)
	frame := make([]byte, 1<<16)
	for {
		n, err := l.wire.Read(frame)
		if err != nil {
			return // closed
		}
		l.mu.Lock()
		replies, err := l.take(frame[:n])
		if err != nil {
			l.bad = append(l.bad, fmt.Sprintf("%v: %x", err, frame[:n]))
		}
		l.mu.Unlock()
		for _, reply := range replies {
			_, _ = l.wire.Write(reply) // the sandbox may have gone
		}
	}
}

const (
	etherARP, etherIPv4           = 0x0806, 0x0800
	protoICMP, protoTCP, protoUDP = 1, 6, 17
	etherLen, ipLen, minTransport = 14, 20, 8
)

// take looks at a frame and returns the answers.
func (l *lan) take(f []byte) ([][]byte, error) {
	n := lanNetwork()
	if len(f) < etherLen || len(f) > etherLen+n.MTU {
		return nil, errors.New("its length")
	}
	if !bytes.Equal(f[6:12], n.MAC[:]) {
		return nil, errors.New("it is from another device")
	}
	body := f[etherLen:]
	switch binary.BigEndian.Uint16(f[12:]) {
	case etherARP:
		return arpReply(body), nil
	case etherIPv4:
		return l.takeIP(body)
	}
	return nil, nil // IPv6, to which nobody here answers
}

func ethernet(kind uint16, body []byte) []byte {
	mac := lanNetwork().MAC
	f := append(mac[:], lanMAC[:]...)
	return append(binary.BigEndian.AppendUint16(f, kind), body...)
}

// arpReply answers for the gateway and the DNS server.
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
	return [][]byte{ethernet(etherARP, r)}
}

func (l *lan) takeIP(b []byte) ([][]byte, error) {
	if len(b) < ipLen || b[0] != 0x45 || int(binary.BigEndian.Uint16(b[2:])) > len(b) {
		return nil, nil // options, which nobody here sends but IGMP
	}
	if checksum(b[:ipLen]) != 0 {
		return nil, errors.New("the checksum of its header")
	}
	head, data := b[:ipLen], b[ipLen:binary.BigEndian.Uint16(b[2:])]
	if len(data) < minTransport {
		return nil, errors.New("its length")
	}
	proto := head[9]
	sum := checksum(data)
	if proto != protoICMP {
		sum = checksum(append(pseudoHeader(head, len(data)), data...))
	}
	if sum != 0 {
		return nil, errors.New("the checksum of its contents")
	}
	var replies [][]byte
	switch proto {
	case protoICMP:
		if data[0] == 8 {
			reply := slices.Clone(data)
			reply[0] = 0
			setChecksum(reply, 2, nil)
			replies = [][]byte{reply}
		}
	case protoUDP:
		replies = l.dns(data)
	case protoTCP:
		replies = l.tcp(head, data)
	}
	for i, r := range replies {
		replies[i] = ethernet(etherIPv4, ipReply(head, proto, r))
	}
	return replies, nil
}

// ipReply goes back to where a packet with this header came from.
func ipReply(head []byte, proto byte, data []byte) []byte {
	r := make([]byte, ipLen)
	r[0], r[8], r[9] = 0x45, 64, proto
	binary.BigEndian.PutUint16(r[2:], uint16(ipLen+len(data)))
	copy(r[12:16], head[16:20])
	copy(r[16:20], head[12:16])
	setChecksum(r, 10, nil)
	switch proto {
	case protoUDP:
		setChecksum(data, 6, pseudoHeader(r, len(data)))
	case protoTCP:
		setChecksum(data, 16, pseudoHeader(r, len(data)))
	}
	return slices.Concat(r, data)
}

// dns answers a query for an A record, and with nothing any other.
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

// pseudoHeader is what the checksums of UDP and TCP also cover.
func pseudoHeader(ip []byte, length int) []byte {
	p := slices.Clone(ip[12:20])
	p = append(p, 0, ip[9])
	return binary.BigEndian.AppendUint16(p, uint16(length))
}

// setChecksum puts the checksum of b, and of what it covers before, at an offset.
func setChecksum(b []byte, at int, before []byte) {
	b[at], b[at+1] = 0, 0
	binary.BigEndian.PutUint16(b[at:], checksum(append(before, b...)))
}

// checksum is that of RFC 1071; of what has a right one it is 0.
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
