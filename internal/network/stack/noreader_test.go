package stack

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"agentrun.dev/internal/network/networktest"
)

// fill fills a wire: a sandbox asks, and does not read the answers.
func (h *hostile) fill(t *testing.T) {
	t.Helper()
	ping := arpFrame(config.MAC, config.Address, config.Gateway)
	before := h.w.Stats().Dropped[DropFull]
	eventually(t, "the wire is full", func() bool {
		for range 100 {
			h.send(t, ping)
		}
		return h.w.Stats().Dropped[DropFull] > before
	})
}

func (h *hostile) send(t *testing.T, frame []byte) {
	t.Helper()
	if _, err := h.Write(frame); err != nil {
		t.Fatal(err)
	}
}

// TestQuestionsOfNoReader: a sandbox that asks DNS and never reads the answers has no
// more goroutines than the number of questions that it may ask at once.
func TestQuestionsOfNoReader(t *testing.T) {
	h := newHostile(t, sink{}, func(c *Config) { c.Limits.Queries = 8 })
	h.fill(t)
	question := udpFrame(me4, "10.255.255.1:53", "a question of DNS")
	for range 2000 {
		h.send(t, question)
	}
	eventually(t, "the questions are read", func() bool {
		h.w.poll.mu.Lock()
		defer h.w.poll.mu.Unlock()
		n, err := unix.IoctlGetInt(h.w.fd, unix.TIOCINQ)
		return err == nil && n == 0 && !h.w.poll.reading
	})
	h.w.tx.mu.Lock()
	defer h.w.tx.mu.Unlock()
	if h.w.tx.waiting > 8 {
		t.Errorf("%d answers wait for room, at most 8 questions are answered at once", h.w.tx.waiting)
	}
}

// stuck is an Outside whose connections last until they are closed, whatever happens
// inside.
type stuck struct{ sink }

type stuckRemote struct {
	ctx   context.Context
	close context.CancelFunc
}

func (r stuckRemote) Splice(Conn)  { <-r.ctx.Done() }
func (r stuckRemote) Close() error { r.close(); return nil }

func (stuck) DialTCP(context.Context, netip.AddrPort, netip.AddrPort) (Remote, error) {
	ctx, cancel := context.WithCancel(context.Background())
	return stuckRemote{ctx, cancel}, nil
}

// TestResetsOfNoReader: a sandbox that never reads, and sends segments of a
// connection that it has reset, does not block the goroutines that read the wires of
// others.
func TestResetsOfNoReader(t *testing.T) {
	p := newPoller(t)
	for range maxWorkers {
		near, far := networktest.NewWire(t)
		h := &hostile{near, attachEnd(t, p, far, stuck{})}
		h.send(t, tcpFrame(me4, other4, header.TCPFields{SeqNum: 100, Flags: header.TCPFlagSyn, WindowSize: 1000}))
		b := make([]byte, 2000)
		h.SetReadDeadline(time.Now().Add(patience))
		n, err := h.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		theirs := header.TCP(header.IPv4(b[headLen:n]).Payload()).SequenceNumber()
		h.send(t, tcpFrame(me4, other4, header.TCPFields{SeqNum: 101, AckNum: theirs + 1, Flags: header.TCPFlagAck, WindowSize: 1000}))
		endpoints := func() int {
			h.w.mu.Lock()
			defer h.w.mu.Unlock()
			for _, c := range h.w.conns {
				if c.inside != nil && terminal(c.inside.endpoint) {
					return 0
				}
				if c.inside != nil {
					return 1
				}
			}
			return -1
		}
		eventually(t, "it is connected", func() bool { return endpoints() == 1 })
		h.send(t, tcpFrame(me4, other4, header.TCPFields{SeqNum: 101, Flags: header.TCPFlagRst}))
		eventually(t, "netstack has forgotten it", func() bool { return endpoints() == 0 })
		h.fill(t)
		h.send(t, tcpFrame(me4, other4, header.TCPFields{SeqNum: 101, AckNum: theirs + 1, Flags: header.TCPFlagAck, WindowSize: 1000}))
	}
	near, far := networktest.NewWire(t)
	attachEnd(t, p, far, stuck{})
	if _, err := near.Write(arpFrame(config.MAC, config.Address, config.Gateway)); err != nil {
		t.Fatal(err)
	}
	near.SetReadDeadline(time.Now().Add(patience))
	if _, err := near.Read(make([]byte, 2000)); err != nil {
		t.Errorf("another sandbox got no answer: %v", err)
	}
}
