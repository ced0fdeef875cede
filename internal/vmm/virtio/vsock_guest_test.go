package virtio

import (
	"bytes"
	"errors"
	"io"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// vsockGuest plays the guest's vsock driver, and its sockets.
type vsockGuest struct {
	*guest
	dev     *Vsock
	hosts   chan *os.File // host ends of accepted connections
	credit  uint32        // buf_alloc that the guest announces
	fwd     uint32        // fwd_cnt that it announces
	scratch uint64        // address of packets to send
	rxAt    map[uint16]uint64
	settled atomic.Int32 // calls of the function given to AttachStandby
}

const (
	acceptPort = 1024 // the only port the host listens on
	rxBufLen   = 4096
)

func newVsockGuest(t testing.TB, timeout time.Duration) *vsockGuest {
	t.Helper()
	g := &vsockGuest{hosts: make(chan *os.File, 2*MaxVsockConns), credit: 1 << 20}
	g.dev = g.newDevice(t, timeout)
	g.guest = startGuest(t, g.dev)
	g.scratch = g.alloc(512 << 10)
	return g
}

func (g *vsockGuest) newDevice(t testing.TB, timeout time.Duration) *Vsock {
	return NewVsock(VsockConfig{CloseTimeout: timeout, Accept: func(port uint32) (*os.File, bool) {
		if port != acceptPort {
			return nil, false
		}
		a, b := socketpair(t, unix.SOCK_STREAM)
		g.hosts <- b
		return a, true
	}})
}

// feed gives n receive buffers.
func (g *vsockGuest) feed(n int) {
	g.t.Helper()
	if g.rxAt == nil {
		g.rxAt = make(map[uint16]uint64)
	}
	for range n {
		b := g.in(rxBufLen)
		g.rxAt[g.add(vsockRx, b)] = b.gpa
	}
	g.kick(vsockRx)
}

// fill completes a header with the values of a well-behaved guest.
func (g *vsockGuest) fill(h vsockHeader) vsockHeader {
	h.srcCID, h.dstCID, h.kind, h.bufAlloc, h.fwdCnt = GuestCID, HostCID, vsockStream, g.credit, g.fwd
	return h
}

// sendRaw sends a packet unchanged; the device handles it before this returns.
func (g *vsockGuest) sendRaw(h vsockHeader, payload []byte) {
	g.t.Helper()
	p := make([]byte, vsockHeaderLen, vsockHeaderLen+len(payload))
	h.put(p)
	g.put(g.scratch, append(p, payload...))
	g.send(vsockTx, buf{gpa: g.scratch, len: uint32(len(p) + len(payload))})
	g.wantUsed(vsockTx)
}

// tx sends a well-formed packet on a connection.
func (g *vsockGuest) tx(k connKey, op uint16, flags uint32, payload []byte) {
	g.t.Helper()
	h := g.fill(vsockHeader{srcPort: k.guest, dstPort: k.host, op: op, flags: flags, len: uint32(len(payload))})
	g.sendRaw(h, payload)
}

// rx waits for a packet and gives its buffer back.
func (g *vsockGuest) rx() (vsockHeader, []byte) {
	g.t.Helper()
	head, n := g.wait(vsockRx)
	return g.parse(head, n)
}

func (g *vsockGuest) parse(head, n uint32) (vsockHeader, []byte) {
	g.t.Helper()
	gpa := g.rxAt[uint16(head)]
	p := g.get(gpa, int(n))
	h := parseVsockHeader(p)
	if h.len != n-vsockHeaderLen || h.srcCID != HostCID && h.op != opReset || h.dstCID != GuestCID && h.op != opReset {
		g.t.Fatalf("packet %+v in %d bytes", h, n)
	}
	delete(g.rxAt, uint16(head))
	g.rxAt[g.add(vsockRx, buf{gpa: gpa, len: rxBufLen, write: true})] = gpa
	g.kick(vsockRx)
	return h, p[vsockHeaderLen:]
}

// want waits for a packet of one kind.
func (g *vsockGuest) want(k connKey, op uint16) (vsockHeader, []byte) {
	g.t.Helper()
	h, p := g.rx()
	if h.op != op || h.srcPort != k.host || h.dstPort != k.guest {
		g.t.Fatalf("packet %+v, want op %d on %+v", h, op, k)
	}
	return h, p
}

func (g *vsockGuest) wantNothing() {
	g.t.Helper()
	if head, n, ok := g.used(vsockRx); ok {
		h, _ := g.parse(head, n)
		g.t.Fatalf("unexpected packet %+v", h)
	}
}

// dial connects from the guest to the host.
func (g *vsockGuest) dial(port uint32) (connKey, *os.File) {
	g.t.Helper()
	k := connKey{host: acceptPort, guest: port}
	g.tx(k, opRequest, 0, nil)
	g.want(k, opResponse)
	return k, <-g.hosts
}

// call connects from the host to the guest.
func (g *vsockGuest) call(port uint32) (connKey, *os.File) {
	g.t.Helper()
	a, b := socketpair(g.t, unix.SOCK_STREAM)
	result := make(chan error, 1)
	g.dev.Connect(port, a, func(err error) { result <- err })
	h, _ := g.rx()
	if h.op != opRequest || h.dstPort != port || h.bufAlloc != VsockBuffer {
		g.t.Fatalf("request %+v", h)
	}
	k := connKey{host: h.srcPort, guest: port}
	g.tx(k, opResponse, 0, nil)
	if err := await(g.t, result); err != nil {
		g.t.Fatal(err)
	}
	return k, b
}

func await[T any](t testing.TB, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(patience):
		t.Fatal("nothing came")
	}
	return v
}

func (g *vsockGuest) conns() int { return g.dev.Stats().Connections }

func mustWrite(t testing.TB, f *os.File, p []byte) {
	t.Helper()
	if _, err := f.Write(p); err != nil {
		t.Fatal(err)
	}
}

func mustRead(t testing.TB, f *os.File, want []byte) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(f, got); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("read %d bytes: %v", len(got), err)
	}
}

func wantEOF(t testing.TB, f *os.File) {
	t.Helper()
	if n, err := f.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Fatalf("read %d, %v, want EOF", n, err)
	}
}

// closeWrite shuts down the sending half of the host's end.
func closeWrite(t testing.TB, f *os.File) { shutHalf(t, f, unix.SHUT_WR) }

func shutHalf(t testing.TB, f *os.File, how int) {
	t.Helper()
	raw, err := f.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if cerr := raw.Control(func(fd uintptr) { err = unix.Shutdown(int(fd), how) }); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
}
