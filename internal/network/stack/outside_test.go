package stack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
)

// loopback is an Outside that leads to the test's servers on the host's loopback, at
// the same port, whatever address the sandbox asks for.
type loopback struct {
	// refuse and unreachable are ports that are refused and unreachable.
	refuse, unreachable uint16
	// block is a port whose dial lasts until its context ends.
	block uint16
	dials chan netip.AddrPort

	mu      sync.Mutex
	count   Counters
	answers func(query []byte, tcp bool) []byte
}

type tcpRemote struct {
	net.Conn
	o *loopback
}

func (r *tcpRemote) Splice(inside Conn) { Splice(inside, r.Conn, &r.o.count) }

func (r *tcpRemote) Close() error {
	r.Conn.(*net.TCPConn).SetLinger(0)
	return r.Conn.Close()
}

func (o *loopback) DialTCP(ctx context.Context, from, to netip.AddrPort) (Remote, error) {
	if o.dials != nil {
		o.dials <- to
	}
	switch to.Port() {
	case o.refuse:
		return nil, fmt.Errorf("no rule: %w", ErrRefused)
	case o.unreachable:
		return nil, ErrUnreachable
	case o.block:
		<-ctx.Done()
		return nil, ctx.Err()
	}
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", to.Port()))
	if errors.Is(err, syscall.ECONNREFUSED) {
		err = errors.Join(ErrRefused, err)
	}
	if err != nil {
		return nil, err
	}
	return &tcpRemote{c, o}, nil
}

func (o *loopback) DialUDP(ctx context.Context, from, to netip.AddrPort) (net.Conn, error) {
	if to.Port() == o.refuse {
		return nil, ErrRefused
	}
	return (&net.Dialer{}).DialContext(ctx, "udp", fmt.Sprintf("127.0.0.1:%d", to.Port()))
}

func (o *loopback) ServeDNS(_ context.Context, query []byte, tcp bool) []byte {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.answers == nil {
		return nil
	}
	return o.answers(query, tcp)
}

// newPoller starts a poller. At the end of the test it is closed and must leave
// nothing behind.
func newPoller(t testing.TB) *Poller {
	t.Helper()
	p, err := NewPoller(32 << 10)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		nothingLeft(t)
	})
	return p
}

// nothingLeft fails if goroutines of this package, or any part of netstack, are left.
func nothingLeft(t testing.TB) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		stacks := make([]byte, 1<<20)
		stacks = stacks[:runtime.Stack(stacks, true)]
		left := ""
		for _, g := range strings.Split(string(stacks), "\n\n") {
			if strings.Contains(g, "network/stack.(*Wire)") || strings.Contains(g, "network/stack.(*conn)") ||
				strings.Contains(g, "network/stack.(*flow)") || strings.Contains(g, "network/stack.(*Poller)") || strings.Contains(g, "gvisor.dev/gvisor") {
				left = g
			}
		}
		if left == "" && len(tcpip.GetDanglingEndpoints()) > 0 {
			left = "an endpoint of netstack"
		}
		if left == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("this is left:\n%s", left)
			return
		}
		runtime.Gosched()
	}
}

// serve runs a TCP server on the host's loopback, and returns its port.
func serve(t testing.TB, handle func(*net.TCPConn)) uint16 {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	t.Cleanup(func() { l.Close(); running.Wait() })
	running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			running.Go(func() {
				defer c.Close()
				handle(c.(*net.TCPConn))
			})
		}
	})
	return uint16(l.Addr().(*net.TCPAddr).Port)
}

// patience is how long tests wait for an expected event, because a busy host may be
// slow.
const patience = time.Minute

// eventually waits for a condition without an event.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !is(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("still not: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}
