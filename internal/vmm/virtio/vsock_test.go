package virtio

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func TestVsockEcho(t *testing.T) {
	for name, connect := range map[string]func(*vsockGuest) (connKey, *os.File){
		"guest dials": func(g *vsockGuest) (connKey, *os.File) { return g.dial(5000) },
		"host dials":  func(g *vsockGuest) (connKey, *os.File) { return g.call(52) },
	} {
		t.Run(name, func(t *testing.T) {
			g := newVsockGuest(t, 0)
			g.feed(8)
			k, host := connect(g)
			for i := range 40 {
				ping := bytes.Repeat([]byte{byte(i)}, 1+i*100)
				g.tx(k, opData, 0, ping)
				mustRead(t, host, ping)
				mustWrite(t, host, ping)
				var got []byte
				for len(got) < len(ping) {
					h, p := g.want(k, opData)
					if h.bufAlloc != VsockBuffer || h.fwdCnt != uint32(len(ping)+sum(i)) {
						t.Fatalf("credit %d, %d", h.bufAlloc, h.fwdCnt)
					}
					got = append(got, p...)
				}
				if !bytes.Equal(got, ping) {
					t.Fatalf("round %d: other bytes", i)
				}
			}
			s := g.dev.Stats()
			if s.Connections != 1 || s.TxBytes != s.RxBytes || s.TxBytes != uint64(sum(40)) {
				t.Fatalf("stats %+v", s)
			}
		})
	}
}

// sum is the number of bytes sent in the first n rounds of the echo.
func sum(n int) (total int) {
	for i := range n {
		total += 1 + i*100
	}
	return total
}

func TestVsockConfigSpace(t *testing.T) {
	g := newGuest(t, NewVsock(VsockConfig{}))
	if g.readReg(regConfig) != GuestCID || g.readReg(regConfig+4) != 0 {
		t.Fatal("wrong CID")
	}
	g.writeReg(regConfig, 5)
	if g.readReg(regConfig) != GuestCID {
		t.Fatal("CID was overwritten")
	}
}

func TestVsockBadPackets(t *testing.T) {
	unknown := connKey{host: 7, guest: 8}
	tests := []struct {
		name    string
		change  func(*vsockHeader)
		payload int
		reset   bool // is answered with RST
		kills   bool // ends the connection it names
		known   bool // names an existing connection
	}{
		{name: "source is the host", change: func(h *vsockHeader) { h.srcCID = HostCID }, known: true},
		{name: "source is another guest", change: func(h *vsockHeader) { h.srcCID = 4 }},
		{name: "to another guest", change: func(h *vsockHeader) { h.dstCID = 4; h.op = opRequest }, reset: true},
		{name: "to the hypervisor", change: func(h *vsockHeader) { h.dstCID = 0; h.op = opRequest }, reset: true},
		{name: "seqpacket", change: func(h *vsockHeader) { h.kind = 2; h.op = opRequest }, reset: true},
		{name: "unknown type", change: func(h *vsockHeader) { h.kind = 99 }, reset: true},
		{name: "reset of another type", change: func(h *vsockHeader) { h.kind = 99; h.op = opReset }},
		{name: "data for nobody", change: func(h *vsockHeader) { h.op, h.len = opData, 3 }, payload: 3, reset: true},
		{name: "reset for nobody", change: func(h *vsockHeader) { h.op = opReset }},
		{name: "response for nobody", change: func(h *vsockHeader) { h.op = opResponse }, reset: true},
		{name: "shutdown for nobody", change: func(h *vsockHeader) { h.op = opShutdown }, reset: true},
		{name: "credit for nobody", change: func(h *vsockHeader) { h.op = opCreditUpdate }, reset: true},
		{name: "unknown op for nobody", change: func(h *vsockHeader) { h.op = 77 }, reset: true},
		{name: "request to a closed port", change: func(h *vsockHeader) { h.op = opRequest }, reset: true},
		{name: "unknown op", change: func(h *vsockHeader) { h.op = 77 }, known: true, reset: true, kills: true},
		{name: "op 0", change: func(h *vsockHeader) { h.op = 0 }, known: true, reset: true, kills: true},
		{name: "second request", change: func(h *vsockHeader) { h.op = opRequest }, known: true, reset: true, kills: true},
		{name: "second response", change: func(h *vsockHeader) { h.op = opResponse }, known: true, reset: true, kills: true},
		{name: "longer than the chain", change: func(h *vsockHeader) { h.op, h.len = opData, 4 }, payload: 3, known: true, reset: true, kills: true},
		{name: "shorter than the chain", change: func(h *vsockHeader) { h.op, h.len = opData, 2 }, payload: 3, known: true, reset: true, kills: true},
		{name: "length overflows", change: func(h *vsockHeader) { h.op, h.len = opData, 1<<32-1 }, payload: 3, known: true, reset: true, kills: true},
		{name: "wrong length for nobody", change: func(h *vsockHeader) { h.op, h.len = opData, 9 }, reset: true},
		{name: "reset", change: func(h *vsockHeader) { h.op = opReset }, known: true, kills: true},
		{name: "empty data", change: func(h *vsockHeader) { h.op = opData }, known: true},
		{name: "shutdown of nothing", change: func(h *vsockHeader) { h.op, h.flags = opShutdown, 0xfffffffc }, known: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			g := newVsockGuest(t, 0)
			g.feed(4)
			k, _ := g.dial(9)
			if !tt.known {
				k = unknown
			}
			h := g.fill(vsockHeader{srcPort: k.guest, dstPort: k.host, op: opCreditUpdate})
			tt.change(&h)
			g.sendRaw(h, make([]byte, tt.payload))
			if tt.reset {
				if r, _ := g.want(k, opReset); r.kind != h.kind || r.srcCID != h.dstCID || r.dstCID != h.srcCID {
					t.Fatalf("reset %+v for %+v", r, h)
				}
			}
			g.wantNothing()
			if want := map[bool]int{false: 1, true: 0}[tt.kills]; g.conns() != want {
				t.Fatalf("%d connections, want %d", g.conns(), want)
			}
			g.wantHealthy()
		})
	}
	t.Run("shorter than a header", func(t *testing.T) {
		g := newVsockGuest(t, 0)
		g.feed(4)
		g.send(vsockTx, g.out(make([]byte, vsockHeaderLen-1)))
		g.send(vsockTx, g.in(100))
		g.wantUsed(vsockTx)
		g.wantUsed(vsockTx)
		g.wantNothing()
		if g.dev.Stats().Dropped != 2 {
			t.Fatalf("stats %+v", g.dev.Stats())
		}
	})
}

// TestVsockConnectRefused lists the ways in which Connect fails.
func TestVsockConnectRefused(t *testing.T) {
	g := newVsockGuest(t, 0)
	g.feed(8)
	connect := func() (connKey, <-chan error, *os.File, func()) {
		a, b := socketpair(t, unix.SOCK_STREAM)
		result := make(chan error, 1)
		cancel := g.dev.Connect(52, a, func(err error) { result <- err })
		if g.conns() == 0 {
			return connKey{}, result, b, cancel
		}
		h, _ := g.rx()
		return connKey{host: h.srcPort, guest: 52}, result, b, cancel
	}
	k, result, host, _ := connect()
	g.tx(k, opReset, 0, nil)
	if err := await(t, result); !errors.Is(err, ErrVsockReset) {
		t.Fatalf("reset: %v", err)
	}
	wantEOF(t, host)
	k, result, host, _ = connect()
	g.tx(k, opData, 0, []byte("too early"))
	g.want(k, opReset)
	if err := await(t, result); !errors.Is(err, ErrVsockReset) {
		t.Fatalf("data before response: %v", err)
	}
	wantEOF(t, host)
	k, result, host, cancel := connect()
	cancel()
	cancel()
	g.want(k, opReset)
	if err := await(t, result); !errors.Is(err, ErrVsockCanceled) {
		t.Fatalf("cancel: %v", err)
	}
	wantEOF(t, host)
	_, result, host, _ = connect()
	g.writeReg(regStatus, 0)
	if err := await(t, result); !errors.Is(err, ErrVsockReset) {
		t.Fatalf("driver reset: %v", err)
	}
	wantEOF(t, host)
	_, result, host, _ = connect()
	if err := await(t, result); !errors.Is(err, ErrVsockNotReady) {
		t.Fatalf("no driver: %v", err)
	}
	wantEOF(t, host)
}

func TestVsockConnectUnusableFile(t *testing.T) {
	g := newVsockGuest(t, 0)
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	result := make(chan error, 1)
	g.dev.Connect(1, f, func(err error) { result <- err })
	if await(t, result) == nil || g.conns() != 0 {
		t.Fatal("a file that cannot be polled was accepted")
	}
	g.dev.accept = func(uint32) (*os.File, bool) {
		f, err := os.Open(os.DevNull)
		return f, err == nil
	}
	g.feed(2)
	k := connKey{host: 1, guest: 2}
	g.tx(k, opRequest, 0, nil)
	g.want(k, opReset)
}

// TestVsockManyConnections: the limit holds for both sides, and port numbers
// wrap around.
func TestVsockManyConnections(t *testing.T) {
	g := newVsockGuest(t, 0)
	g.feed(8)
	g.dev.nextPort = vsockLastPort
	k1, _ := g.call(52)
	k2, _ := g.call(52)
	if k1.host != vsockLastPort || k2.host != vsockFirstPort {
		t.Fatalf("ports %d, %d", k1.host, k2.host)
	}
	g.dev.nextPort = vsockLastPort
	if k3, _ := g.call(52); k3.host != vsockFirstPort+1 {
		t.Fatalf("port %d", k3.host)
	}
	for p := uint32(0); g.conns() < MaxVsockConns; p++ {
		_, host := g.dial(p)
		defer host.Close()
	}
	k := connKey{host: acceptPort, guest: 1 << 20}
	g.tx(k, opRequest, 0, nil)
	g.want(k, opReset)
	a, b := socketpair(t, unix.SOCK_STREAM)
	result := make(chan error, 1)
	g.dev.Connect(52, a, func(err error) { result <- err })
	if err := await(t, result); !errors.Is(err, ErrVsockBusy) {
		t.Fatal(err)
	}
	wantEOF(t, b)
	g.tx(k1, opReset, 0, nil)
	g.call(52)
}

// TestVsockStarvedGuest: a guest that gives no receive buffers uses no memory
// of the host, and gets its replies when it gives buffers.
func TestVsockStarvedGuest(t *testing.T) {
	g := newVsockGuest(t, 0)
	for i := range uint32(5000) {
		k := connKey{host: 7, guest: i % 1000}
		g.tx(k, opData, 0, nil)
	}
	k := connKey{host: acceptPort, guest: 9}
	g.tx(k, opRequest, 0, nil)
	host := <-g.hosts
	for range 1000 {
		g.tx(k, opCreditRequest, 0, nil)
	}
	mustWrite(t, host, []byte("waits"))
	g.dev.mu.Lock()
	resets, talking := len(g.dev.resets), len(g.dev.talking)
	capacity := cap(g.dev.resets) + cap(g.dev.talking)
	g.dev.mu.Unlock()
	if resets != vsockMaxResets || talking != 1 || capacity > 4*vsockMaxResets {
		t.Fatalf("%d resets, %d connections wait", resets, talking)
	}
	g.feed(8)
	for range resets {
		if h, _ := g.rx(); h.op != opReset {
			t.Fatalf("packet %+v", h)
		}
	}
	g.want(k, opResponse)
	g.want(k, opCreditUpdate)
	if _, p := g.want(k, opData); string(p) != "waits" {
		t.Fatalf("data %q", p)
	}
	if s := g.dev.Stats(); s.Resets != vsockMaxResets || s.Dropped == 0 {
		t.Fatalf("stats %+v", s)
	}
}

// TestVsockReusedPorts: a RST that waits for the old connection does not hit a
// new one with the same ports.
func TestVsockReusedPorts(t *testing.T) {
	g := newVsockGuest(t, 0)
	k := connKey{host: acceptPort, guest: 9}
	g.tx(k, opData, 0, nil) // unknown: a RST waits
	g.tx(k, opRequest, 0, nil)
	g.feed(4)
	g.want(k, opResponse)
	g.wantNothing()
}

func TestVsockBroken(t *testing.T) {
	for name, breakIt := range map[string]func(*vsockGuest, connKey){
		"tx ring":       func(g *vsockGuest, _ connKey) { g.send(vsockTx, buf{gpa: 1 << 40, len: 50}) },
		"small receive": func(g *vsockGuest, k connKey) { g.send(vsockRx, g.in(vsockHeaderLen)) },
	} {
		t.Run(name, func(t *testing.T) {
			g := newVsockGuest(t, 0)
			g.feed(1)
			k, host := g.dial(9)
			// The one good buffer is taken, so that a bad one comes next.
			g.tx(k, opCreditRequest, 0, nil)
			if _, _, ok := g.used(vsockRx); !ok {
				t.Fatal("no answer")
			}
			g.tx(k, opCreditRequest, 0, nil)
			breakIt(g, k)
			g.wantBroken()
			wantEOF(t, host)
			if g.conns() != 0 {
				t.Fatal("connections survived")
			}
			g.send(vsockTx, g.out(make([]byte, 100)))
			if _, _, ok := g.used(vsockTx); ok {
				t.Fatal("a broken device works")
			}
			g.start(transportFeatures, 16)
			g.rxAt = nil
			g.feed(2)
			g.dial(9)
		})
	}
}

// TestVsockLazyCompletions: used transmit buffers are visible at once. The
// interrupt comes after a quarter of the ring, or with the next received
// packet.
func TestVsockLazyCompletions(t *testing.T) {
	g := newVsockGuest(t, 0)
	g.feed(8)
	k, host := g.dial(9)
	g.tx(k, opCreditUpdate, 0, nil)
	base := g.raised.Load()
	for i := range int64(7) { // a quarter of 16; one is already unannounced
		g.tx(k, opCreditUpdate, 0, nil)
		if got, want := g.raised.Load()-base, (i+2)/4; got != want {
			t.Fatalf("%d interrupts after %d packets, want %d", got, i+2, want)
		}
	}
	// Descriptors count, not packets.
	base = g.raised.Load()
	h := g.fill(vsockHeader{srcPort: k.guest, dstPort: k.host, op: opCreditUpdate})
	p := make([]byte, vsockHeaderLen)
	h.put(p)
	g.send(vsockTx, g.out(p[:10]), g.out(p[10:20]), g.out(p[20:30]), g.out(p[30:]))
	g.wantUsed(vsockTx)
	if g.raised.Load() != base+1 {
		t.Fatal("four descriptors are a quarter of the ring")
	}
	// A receive interrupt also covers earlier transmit buffers.
	g.tx(k, opData, 0, []byte("ping"))
	g.tx(k, opCreditUpdate, 0, nil)
	g.tx(k, opCreditUpdate, 0, nil)
	if g.raised.Load() != base+1 {
		t.Fatal("not lazy")
	}
	mustRead(t, host, []byte("ping"))
	mustWrite(t, host, []byte("pong"))
	g.want(k, opData)
	for g.dev.lazy() != 0 { // the interrupt follows the packet
		g.waitIRQ()
	}
	g.tx(k, opCreditUpdate, 0, nil)
	if g.raised.Load() != base+2 {
		t.Fatalf("%d interrupts", g.raised.Load()-base)
	}
	// A masked receive queue raises no interrupt, so the count continues.
	g.maskIRQ(vsockRx, true)
	g.tx(k, opCreditRequest, 0, nil)
	g.want(k, opCreditUpdate)
	g.tx(k, opCreditUpdate, 0, nil)
	if g.raised.Load() != base+2 {
		t.Fatal("masked")
	}
	g.tx(k, opCreditUpdate, 0, nil)
	if g.raised.Load() != base+3 {
		t.Fatal("a quarter of the ring was not announced")
	}
	// Bytes count, too.
	g.tx(k, opData, 0, make([]byte, 250<<10))
	if g.raised.Load() != base+3 {
		t.Fatal("not lazy")
	}
	mustRead(t, host, make([]byte, 250<<10))
	g.tx(k, opData, 0, make([]byte, 6<<10))
	if g.raised.Load() != base+4 {
		t.Fatal("256 KiB were not announced")
	}
}

func (d *Vsock) lazy() uint32 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lazySlots
}
