package netd_test

import (
	"context"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"
	"time"

	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/networktest"
	"agentrun.dev/internal/network/wire"
)

// unread is a sandbox with connections to a server that sends endlessly, and with a
// full wire: its program does not read, or it is paused.
func unread(t *testing.T, p running, id netctl.ID, server string, connections int) {
	t.Helper()
	near, far := networktest.NewWire(t)
	if err := p.Attach(t.Context(), wireOf(id, rules(server)), far); err != nil {
		t.Fatal(err)
	}
	a := &attacker{near: near, rng: rand.New(rand.NewPCG(1, 2)), echo: netip.MustParseAddrPort(server)}
	send := func(m []byte) {
		t.Helper()
		if _, err := near.Write(m); err != nil {
			t.Fatal(err)
		}
	}
	for i := range connections {
		s := segment{from: uint16(2000 + i), to: a.echo, seq: 100}
		send(a.plain(s, syn))
		if err := near.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		answer := segment{}
		for b := make([]byte, wire.MaxMessage); answer.from != s.from; {
			n, err := near.Read(b)
			if err != nil {
				t.Fatal(err)
			}
			answer, _ = answered(b[:n])
		}
		send(a.plain(answer, ack))
	}
	// Questions whose answers are not read fill the wire.
	full := func() uint64 {
		stats, err := p.Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range stats.Dropped {
			if d.Reason == "full" {
				return d.Count
			}
		}
		return 0
	}
	before := full()
	for deadline := time.Now().Add(time.Minute); full() == before; {
		for range 100 {
			send(a.arp())
		}
		if time.Now().After(deadline) {
			t.Fatal("the wire does not fill up")
		}
	}
}

// TestRevokedUnread: when its policy changes, a sandbox that does not read its wire
// loses all its connections at once. It cannot keep its netd from answering.
func TestRevokedUnread(t *testing.T) {
	cfg, _ := config(t)
	p := start(t, cfg)
	const connections = 3
	ended := make(chan struct{}, connections)
	server := serve(t, func(c net.Conn) {
		for b := make([]byte, 64<<10); ; {
			if _, err := c.Write(b); err != nil {
				ended <- struct{}{}
				return
			}
		}
	})
	unread(t, p, "revoked", server, connections)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := p.SetPolicy(ctx, "revoked", rules()); err != nil {
		t.Errorf("another policy: %v", err)
	}
	for i := range connections {
		select {
		case <-ended:
		case <-ctx.Done():
			t.Fatalf("%d of %d connections have ended", i, connections)
		}
	}
	if err := p.Detach(ctx, "revoked"); err != nil {
		t.Errorf("let go of the wire: %v", err)
	}
}

// TestDetachedUnread: such a sandbox cannot keep its netd from dropping its wire
// either.
func TestDetachedUnread(t *testing.T) {
	cfg, _ := config(t)
	p := start(t, cfg)
	server := serve(t, func(c net.Conn) { _, _ = io.Copy(c, endless{}) })
	unread(t, p, "detached", server, 3)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := p.Detach(ctx, "detached"); err != nil {
		t.Errorf("let go of the wire: %v", err)
	}
}

// endless is a reader of zeros.
type endless struct{}

func (endless) Read(b []byte) (int, error) { clear(b); return len(b), nil }
