package netd_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/networktest"
	"agentrun.dev/internal/network/wire"
	"agentrun.dev/test/soak"
	"golang.org/x/net/dns/dnsmessage"
)

// attacker is a sandbox that writes its own frames: well-formed ones that open and
// use connections, flows and names, and the same frames with mistakes.
type attacker struct {
	near *os.File
	rng  *rand.Rand
	echo netip.AddrPort
	sent int

	mu    sync.Mutex // protects all following fields
	conns []segment  // answered by the gateway, the newest last
}

// segment is the state of one of the attacker's connections.
type segment struct {
	from     uint16
	to       netip.AddrPort
	seq, ack uint32
}

// maxKnown is how many connections an attacker continues.
const maxKnown = 256

// Flags of TCP (RFC 9293 §3.1).
const (
	fin = 1 << iota
	syn
	rst
	psh
	ack
	urg
)

// packet is a message with an IP packet from the attacker.
func (a *attacker) packet(to netip.Addr, protocol byte, payload []byte) []byte {
	size := 20
	if to.Is6() {
		size = 40
	}
	m := make([]byte, wire.HeaderLen+wire.EthernetLen+size+len(payload))
	copy(m[wire.HeaderLen:], networktest.GatewayMAC[:])
	copy(m[wire.HeaderLen+6:], networktest.MAC[:])
	kind, ip := m[wire.HeaderLen+12:], m[wire.HeaderLen+wire.EthernetLen:]
	if to.Is6() {
		binary.BigEndian.PutUint16(kind, 0x86dd)
		ip[0], ip[6], ip[7] = 0x60, protocol, 255
		binary.BigEndian.PutUint16(ip[4:], uint16(len(payload)))
		copy(ip[8:], networktest.Address6.AsSlice())
		copy(ip[24:], to.AsSlice())
	} else {
		binary.BigEndian.PutUint16(kind, 0x0800)
		ip[0], ip[8], ip[9] = 0x45, 64, protocol
		binary.BigEndian.PutUint16(ip[2:], uint16(size+len(payload)))
		copy(ip[12:], networktest.Address.AsSlice())
		copy(ip[16:], to.AsSlice())
	}
	copy(ip[size:], payload)
	return m
}

// plain is a segment without options or data.
func (a *attacker) plain(s segment, flags byte) []byte { return a.segment(s, flags, 65535, nil, nil) }

// tcp is a segment, sometimes with random options.
func (a *attacker) tcp(s segment, flags byte, data []byte) []byte {
	options := []byte{}
	switch a.rng.IntN(4) {
	case 0: // MSS, SACK permitted, timestamps, window scale
		options = []byte{2, 4, byte(a.rng.Uint32()), byte(a.rng.Uint32()), 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, byte(a.rng.IntN(20))}
	case 1:
		options = a.bytes(4 * a.rng.IntN(11))
	case 2: // a SACK of data that was never sent
		options = append([]byte{1, 1, 5, 10}, a.bytes(8)...)
	}
	return a.segment(s, flags, []uint16{0, 1, 1000, 65535}[a.rng.IntN(4)], options, data)
}

func (a *attacker) segment(s segment, flags byte, window uint16, options, data []byte) []byte {
	b := make([]byte, 20+len(options)+len(data))
	binary.BigEndian.PutUint16(b, s.from)
	binary.BigEndian.PutUint16(b[2:], s.to.Port())
	binary.BigEndian.PutUint32(b[4:], s.seq)
	binary.BigEndian.PutUint32(b[8:], s.ack)
	b[12], b[13] = byte(20+len(options))<<2, flags
	binary.BigEndian.PutUint16(b[14:], window)
	if flags&urg != 0 {
		binary.BigEndian.PutUint16(b[18:], uint16(a.rng.Uint32()))
	}
	copy(b[20:], options)
	copy(b[20+len(options):], data)
	m := a.packet(s.to.Addr(), 6, b)
	if len(m) > wire.HeaderLen+wire.EthernetLen+networktest.MTU {
		wire.Header{GSO: wire.GSOTCPv4, SegmentSize: uint16(a.rng.IntN(1460) + 1), HeadersLen: 54, Flags: wire.NeedsChecksum, ChecksumStart: 34, ChecksumOffset: 16}.Put(m)
	}
	return m
}

func (a *attacker) udp(to netip.AddrPort, data []byte) []byte {
	b := make([]byte, 8+len(data))
	binary.BigEndian.PutUint16(b, uint16(1024+a.rng.IntN(200)))
	binary.BigEndian.PutUint16(b[2:], to.Port())
	binary.BigEndian.PutUint16(b[4:], uint16(len(b)))
	copy(b[8:], data)
	return a.packet(to.Addr(), 17, b)
}

// arp asks for the gateway.
func (a *attacker) arp() []byte {
	m := a.packet(networktest.Gateway, 0, make([]byte, 8)) // together 28 bytes
	binary.BigEndian.PutUint16(m[wire.HeaderLen+12:], 0x0806)
	b := m[wire.HeaderLen+wire.EthernetLen:]
	clear(b)
	copy(b, []byte{0, 1, 8, 0, 6, 4, 0, 1})
	copy(b[8:], networktest.MAC[:])
	copy(b[14:], networktest.Address.AsSlice())
	copy(b[24:], networktest.Gateway.AsSlice())
	return m
}

func (a *attacker) bytes(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(a.rng.Uint32())
	}
	return b
}

// speech is data for connections.
func (a *attacker) speech() []byte {
	switch a.rng.IntN(7) {
	case 0:
		return []byte("GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n")
	case 1:
		return []byte("POST / HTTP/1.1\r\nHost: api.example.com\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n")
	case 2:
		return append([]byte{22, 3, 1, byte(a.rng.IntN(64)), byte(a.rng.Uint32()), 1}, a.bytes(a.rng.IntN(1400))...)
	case 3:
		return a.bytes(a.rng.IntN(60 << 10))
	case 4:
		return nil
	default:
		return a.bytes(a.rng.IntN(1400))
	}
}

// next is a well-formed frame.
func (a *attacker) next() []byte {
	elsewhere := netip.AddrPortFrom(netip.AddrFrom4([4]byte(a.bytes(4))), uint16(a.rng.IntN(1000)+1))
	if a.rng.IntN(4) == 0 {
		elsewhere = netip.AddrPortFrom(netip.AddrFrom16([16]byte(a.bytes(16))), 80)
	}
	first := segment{from: uint16(1024 + a.rng.IntN(500)), to: a.echo, seq: a.rng.Uint32()}
	switch a.rng.IntN(16) {
	case 0:
		return a.arp()
	case 1:
		return a.packet(networktest.Gateway6, 58, append([]byte{135, 0, 0, 0, 0, 0, 0, 0}, networktest.Gateway6.AsSlice()...))
	case 2:
		return a.packet(networktest.Gateway, 1, append([]byte{8, 0}, a.bytes(a.rng.IntN(1400)+6)...))
	case 3:
		name := []string{"api.example.com.", fmt.Sprintf("n%d.example.org.", a.rng.IntN(1000)), "other.example.com."}[a.rng.IntN(3)]
		q := dnsmessage.Message{
			Header:    dnsmessage.Header{ID: uint16(a.rng.Uint32()), RecursionDesired: true},
			Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name), Type: dnsmessage.Type(a.rng.IntN(70)), Class: dnsmessage.ClassINET}},
		}
		b, err := q.Pack()
		if err != nil {
			panic(err) // the names are valid
		}
		return a.udp(netip.AddrPortFrom([]netip.Addr{networktest.Gateway, networktest.Gateway6}[a.rng.IntN(2)], 53), b)
	case 4:
		return a.udp(a.echo, a.bytes(a.rng.IntN(1400)))
	case 5:
		return a.udp(elsewhere, a.bytes(a.rng.IntN(1400)))
	case 6:
		first.to = elsewhere
		return a.tcp(first, syn, nil)
	case 7:
		first.to = netip.AddrPortFrom(public, []uint16{80, 443}[a.rng.IntN(2)])
		return a.tcp(first, syn, nil)
	case 8:
		first.to = netip.AddrPortFrom(networktest.Gateway, 53)
		return a.tcp(first, syn, nil)
	case 9, 10:
		return a.tcp(first, syn, a.bytes(a.rng.IntN(2)*a.rng.IntN(1400)))
	default:
		return a.goOn(first)
	}
}

// goOn is a segment of a connection that is or was open.
func (a *attacker) goOn(first segment) []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.conns) == 0 {
		return a.tcp(first, syn, nil)
	}
	s := &a.conns[a.rng.IntN(len(a.conns))]
	data := a.speech()
	now := *s
	switch a.rng.IntN(10) {
	case 0:
		return a.tcp(now, rst, nil)
	case 1:
		s.seq++
		return a.tcp(now, fin|ack, nil)
	case 2: // far outside of the window
		now.seq += a.rng.Uint32()
		return a.tcp(now, ack|psh, data)
	case 3: // a hole
		now.seq += uint32(a.rng.IntN(20000))
		return a.tcp(now, ack, data)
	case 4: // data sent before, with other bytes
		now.seq -= uint32(a.rng.IntN(20000))
		return a.tcp(now, ack, data)
	case 5: // an ACK of data that was never sent
		now.ack += a.rng.Uint32()
		return a.tcp(now, ack, data)
	case 6:
		return a.tcp(now, byte(a.rng.Uint32()), data)
	default:
		s.seq += uint32(len(data))
		return a.tcp(now, ack|psh, data)
	}
}

// spoil makes mistakes in a frame.
func (a *attacker) spoil(m []byte) []byte {
	switch a.rng.IntN(8) {
	case 0:
		return m[:a.rng.IntN(len(m)+1)]
	case 1:
		return append(m, a.bytes(a.rng.IntN(1<<a.rng.IntN(17)))...)
	case 2: // a fragment, or options
		m[wire.HeaderLen+wire.EthernetLen+[]int{0, 6, 7}[a.rng.IntN(3)]] = byte(a.rng.Uint32())
		return m
	case 3: // the wire's own header
		copy(m, a.bytes(wire.HeaderLen))
		return m
	case 4, 5:
		for range 1 + a.rng.IntN(4) {
			m[a.rng.IntN(min(len(m), 90))] = byte(a.rng.Uint32())
		}
		return m
	default:
		return m
	}
}

// attack sends frames until the time is over. If the wire does not accept a frame,
// that is an error: a netd must always read.
func (a *attacker) attack(until time.Time) error {
	for time.Now().Before(until) {
		for range 64 {
			if err := a.near.SetWriteDeadline(time.Now().Add(time.Minute)); err != nil {
				return err
			}
			if _, err := a.near.Write(a.spoil(a.next())); err != nil {
				return fmt.Errorf("frame %d: %w", a.sent, err)
			}
			a.sent++
		}
		time.Sleep(time.Millisecond) // the test's host has other work
	}
	return nil
}

// listen reads the gateway's frames and remembers the connections that it has
// answered. It stops reading now and then, so that the wire fills up.
func (a *attacker) listen(rng *rand.Rand) {
	b := make([]byte, wire.MaxMessage)
	for {
		if rng.IntN(20000) == 0 {
			time.Sleep(time.Duration(rng.IntN(3000)) * time.Millisecond)
		}
		n, err := a.near.Read(b)
		if errors.Is(err, os.ErrClosed) {
			return
		}
		s, ok := answered(b[:n])
		if err != nil || !ok {
			continue
		}
		a.mu.Lock()
		if a.conns = append(a.conns, s); len(a.conns) > maxKnown {
			a.conns = a.conns[1:]
		}
		a.mu.Unlock()
	}
}

// answered returns the state of the connection that a message of the gateway answers,
// if it answers one.
func answered(m []byte) (segment, bool) {
	ip := m[min(len(m), wire.HeaderLen+wire.EthernetLen):]
	if len(ip) < 40 || ip[0] != 0x45 || ip[9] != 6 || ip[33]&(syn|ack) != syn|ack {
		return segment{}, false
	}
	return segment{
		from: binary.BigEndian.Uint16(ip[22:]),
		to:   netip.AddrPortFrom(netip.AddrFrom4([4]byte(ip[12:])), binary.BigEndian.Uint16(ip[20:])),
		seq:  binary.BigEndian.Uint32(ip[28:]), ack: binary.BigEndian.Uint32(ip[24:]) + 1,
	}, true
}

// bounded are the limits of each attacker. boundedMemory is the most memory that a
// netd uses for it: connections, flows, buffers.
var bounded = netctl.Limits{Connections: 128, Opening: 32, Flows: 64, Queries: 16, Buffers: 8 << 20}

const boundedMemory = 128*192<<10 + 64*54<<10 + 8<<20

// TestHostileFrames: for a minute, in make soak for an hour, sandboxes send frames
// that no kernel sends, among frames that open connections and use them. Their netd
// survives, its memory is bounded, and a sandbox beside them is served. When they
// have ended, they leave nothing behind.
func TestHostileFrames(t *testing.T) {
	lasts := time.Duration(soak.Count(3600, 60)) * time.Second
	cfg, _ := config(t)
	p := start(t, cfg)
	w := networktest.NewWorld(t, public)
	go resolve(w.ListenPacket(t, netip.AddrPortFrom(public, 53).String()))
	for _, port := range []uint16{80, 443} {
		go discard(w.Listen(t, netip.AddrPortFrom(public, port).String()))
	}
	if err := p.Configure(t.Context(), netctl.Settings{Upstreams: []netip.AddrPort{netip.AddrPortFrom(public, 53)}}); err != nil {
		t.Fatal(err)
	}
	server := serve(t, echo)
	neighbour := networktest.New(t)
	p.attach(t, neighbour, wireOf("neighbour", rules(server, "api.example.com:80")))
	kept, err := neighbour.Dial(t.Context(), "tcp", server)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = kept.Close() }()
	before, descriptors := settled(t, p.PID()), opened(t, p.PID())

	const attackers = 2
	limit := before + 2*attackers*boundedMemory + 64<<20 // the collector runs when as much garbage has accumulated
	seed := rand.Uint64()
	t.Logf("seed %d, %v", seed, lasts)
	until := time.Now().Add(lasts)
	var attacking, listening sync.WaitGroup
	var all []*attacker
	for i := range uint64(attackers) {
		near, far := networktest.NewWire(t)
		hostile := wireOf(wireID(int(i)), rules(server, "udp://"+server, "api.example.com:80", "api.example.com:443", "*.example.org"))
		hostile.Limits = bounded
		if err := p.Attach(t.Context(), hostile, far); err != nil {
			t.Fatal(err)
		}
		a := &attacker{near: near, rng: rand.New(rand.NewPCG(seed, i)), echo: netip.MustParseAddrPort(server)}
		all = append(all, a)
		attacking.Go(func() {
			if err := a.attack(until); err != nil {
				t.Error(err)
			}
		})
		listening.Go(func() { a.listen(rand.New(rand.NewPCG(seed, 1000+i))) })
	}
	most, slowest := 0, time.Duration(0)
	for round := 0; time.Now().Before(until); round++ {
		begin := time.Now()
		err := errors.Join(reach(t.Context(), neighbour, server, "new"), speak(kept, fmt.Sprintf("round %d", round)))
		if m, askErr := ask(t, neighbour, "api.example.com."); askErr != nil || len(m.Answers) != 1 {
			err = errors.Join(err, fmt.Errorf("a name: %+v, %w", m, askErr))
		}
		if err != nil {
			t.Fatalf("the neighbour of the hostile sandboxes: %v", err)
		}
		slowest = max(slowest, time.Since(begin))
		if most = max(most, anonymous(t, p.PID())); most > limit {
			t.Fatalf("netd has %d MiB of memory, more than %d MiB", most>>20, limit>>20)
		}
		time.Sleep(pause)
	}
	attacking.Wait()
	for i, a := range all {
		if err := errors.Join(a.near.Close(), p.Detach(t.Context(), wireID(i))); err != nil {
			t.Error(err)
		}
		t.Logf("sandbox %d sent %d frames, and had %d connections at the end", i, a.sent, len(a.conns))
	}
	listening.Wait()
	settle(t, "descriptors of netd", descriptors, func() int { return opened(t, p.PID()) })
	settle(t, "MiB of netd", before>>20+32, func() int { return anonymous(t, p.PID()) >> 20 }) // pools keep some memory
	if err := speak(kept, "afterwards"); err != nil {
		t.Error(err)
	}
	t.Logf("netd had %d MiB at first, %d MiB at most, %d MiB afterwards; the neighbour's slowest round took %v",
		before>>20, most>>20, anonymous(t, p.PID())>>20, slowest)
	if words, err := os.ReadFile(filepath.Join(cfg.Folder, "stderr")); err != nil || len(words) > 0 {
		t.Errorf("it said %.4000q, %v", words, err)
	}
}

// discard accepts connections, and reads from them until their end.
func discard(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			_, _ = io.Copy(io.Discard, c)
			_ = c.Close()
		}()
	}
}
