package stack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"

	"agentrun.dev/internal/network/networktest"
)

// TestDescriptorsOfAll: a sandbox with many flows and connections leaves descriptors
// for those of others, and for further wires, whose number is bounded, too.
func TestDescriptorsOfAll(t *testing.T) {
	p := newPoller(t)
	p.maxDescriptors = 40
	greedy, other := newGuest(t), newGuest(t)
	w := attach(t, p, greedy, &loopback{})
	attach(t, p, other, &loopback{})
	port := serve(t, echo)
	for i := range 60 {
		c := greedy.mustDial(t, "udp", fmt.Sprintf("203.0.113.5:%d", 2000+i))
		if _, err := c.Write([]byte("x")); err != nil && !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatal(err)
		}
	}
	eventually(t, "flows are refused", func() bool { return w.Stats().Dropped[DropLimit] > 0 })
	if n := w.Stats().Flows; n < 15 || n > 30 {
		t.Errorf("one sandbox has %d of 40 descriptors", n)
	}
	to := fmt.Sprintf("203.0.113.5:%d", port)
	if _, err := greedy.dial("tcp", to); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a connection of a sandbox with all its descriptors: %v", err)
	}
	if err := exchange(other.mustDial(t, "tcp", to), payload(1, 100)); err != nil {
		t.Errorf("another sandbox: %v", err)
	}
	wires := 2
	for ; wires < 60; wires++ {
		_, far := networktest.NewWire(t)
		fd := dup(t, far)
		if _, err := p.Attach(fd, config, &loopback{}); err != nil {
			if !errors.Is(err, ErrBusy) {
				t.Error(err)
			}
			_ = syscall.Close(fd)
			break
		}
	}
	if wires < 9 || wires > 40 {
		t.Errorf("%d wires beside %d descriptors of 40", wires, w.Stats().Flows)
	}
}

// never is an Outside whose dials last until they are given up.
type never struct{ loopback }

func (*never) DialUDP(ctx context.Context, _, _ netip.AddrPort) (net.Conn, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// TestDatagramsThatWait: the datagrams that wait for the dial of their flow are
// bounded by bytes, and counted.
func TestDatagramsThatWait(t *testing.T) {
	for _, mtu := range []int{1500, 65535} {
		t.Run(fmt.Sprint("MTU ", mtu), func(t *testing.T) { datagramsThatWait(t, mtu) })
	}
}

func datagramsThatWait(t *testing.T, mtu int) {
	t.Helper()
	h := newHostile(t, &never{}, func(c *Config) { c.MTU = mtu })
	data := strings.Repeat("x", min(mtu, 30000)-100)
	const flows = 20
	for i := range flows {
		for range 20 {
			if _, err := h.Write(udpFrame(netip.AddrPortFrom(config.Address, 1000).String(), fmt.Sprintf("203.0.113.5:%d", 1000+i), data)); err != nil {
				t.Fatal(err)
			}
		}
	}
	eventually(t, "all were read", func() bool { return h.w.Stats().FramesIn == 20*flows })
	h.w.mu.Lock()
	queued := 0
	for _, f := range h.w.flows {
		queued += int(f.queued.Load())
	}
	used, n := h.w.used, len(h.w.flows)
	h.w.mu.Unlock()
	if n != flows || queued > flows*max(flowBytes, mtu) || queued < flows*len(data) {
		t.Errorf("%d bytes wait in %d flows", queued, n)
	}
	if used.memory < queued+n*mtu || used.descriptors != n {
		t.Errorf("%+v is counted of %d bytes in %d flows", used, queued, n)
	}
}

// TestFrameBeyondMTU: a frame may exceed the MTU only if it is to be cut up.
func TestFrameBeyondMTU(t *testing.T) {
	h := newHostile(t, &never{})
	if _, err := h.Write(udpFrame(netip.AddrPortFrom(config.Address, 1000).String(), "203.0.113.5:1000", strings.Repeat("x", config.MTU))); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is dropped", func() bool { return h.w.Stats().Dropped[DropOversized] == 1 })
	if n := h.w.Stats().Flows; n != 0 {
		t.Errorf("%d flows", n)
	}
}

// TestDefaultLimitsAreTrue: a single sandbox gets as many connections as its limit
// allows, beside as many flows. The next connection is refused.
func TestDefaultLimitsAreTrue(t *testing.T) {
	p, g := newPoller(t), newGuest(t)
	w := attach(t, p, g, &loopback{})
	for i := range DefaultLimits.Flows {
		if _, err := g.mustDial(t, "udp", fmt.Sprintf("203.0.113.5:%d", 20000+i)).Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	to := fmt.Sprintf("203.0.113.5:%d", serve(t, echo))
	var dialling sync.WaitGroup
	turns := make(chan struct{}, 32)
	for range DefaultLimits.Connections {
		turns <- struct{}{}
		dialling.Go(func() {
			defer func() { <-turns }()
			c, err := g.dial("tcp", to)
			if err != nil {
				t.Error(err)
				return
			}
			t.Cleanup(func() { c.Close() })
		})
	}
	dialling.Wait()
	if n := w.Stats().Connections; n != DefaultLimits.Connections {
		t.Errorf("%d connections", n)
	}
	if _, err := g.dial("tcp", to); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("one more: %v", err)
	}
}

// TestReserve: memory that an Outside reserves for a connection comes from the same
// bound.
func TestReserve(t *testing.T) {
	p := newPoller(t)
	p.maxMemory = 16 * connMemory
	w := attach(t, p, newGuest(t), &loopback{})
	i := &insideConn{c: &conn{w: w}}
	release, ok := i.Reserve(8 * connMemory)
	if !ok {
		t.Fatal("there is no memory")
	}
	if _, ok := i.Reserve(8 * connMemory); ok {
		t.Error("one sandbox has all of the memory")
	}
	release()
	release()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.used != (usage{}) {
		t.Errorf("%+v is still taken", p.used)
	}
}
