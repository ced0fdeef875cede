package stack

import (
	"errors"
	"fmt"
	"net"
	"syscall"
	"testing"
)

// TestMemoryOfAll: a sandbox with many connections leaves memory for others. Its next
// connection is refused, and ended connections take no memory.
func TestMemoryOfAll(t *testing.T) {
	p := newPoller(t)
	p.maxMemory = 16 * connMemory
	greedy, other := newGuest(t), newGuest(t)
	attach(t, p, greedy, &loopback{})
	attach(t, p, other, &loopback{})
	to := fmt.Sprintf("203.0.113.5:%d", serve(t, echo))
	var conns []net.Conn
	for {
		c, err := greedy.dial("tcp", to)
		if errors.Is(err, syscall.ECONNREFUSED) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if conns = append(conns, c); len(conns) > 16 {
			t.Fatal("one sandbox has all of the memory, and more")
		}
	}
	if len(conns) < 8 {
		t.Errorf("one sandbox gets %d connections where there is memory for 16", len(conns))
	}
	c, err := other.dial("tcp", to)
	if err != nil {
		t.Fatalf("another sandbox: %v", err)
	}
	if err := exchange(c, payload(1, 1<<20)); err != nil {
		t.Error(err)
	}
	for _, c := range append(conns, c) {
		c.Close()
	}
	eventually(t, "all memory is given back", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.used == usage{}
	})
}
