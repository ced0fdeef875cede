package netds

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"agentrun.dev/internal/network/networktest"
)

// flood sends to all that connects to it, without end, and returns where.
func flood(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", netip.AddrPortFrom(server, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				b := make([]byte, 64<<10)
				for err := error(nil); err == nil; _, err = c.Write(b) {
				}
				_ = c.Close()
			}()
		}
	}()
	return l.Addr().String()
}

// TestBandwidth: a sandbox gets as many bytes in a time as the settings of the node give it, and
// more when they give it more, over the same connection.
func TestBandwidth(t *testing.T) {
	const rate, size = 1 << 20, 3 << 19
	// The most that can come at once: the bucket, and the last frame's debt.
	const atOnce = 2<<16 + 1<<16
	h, from := newHosts(t), flood(t)
	g := networktest.New(t) // it ends after the netds, which may ask for its wire
	n, change := withSettings(t, h.cfg, "bandwidth: {down: 1Mi}")
	if err := n.Join(t.Context(), joint(t, "a", g, from)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := g.Dial(ctx, "tcp", from)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	begin := time.Now()
	if _, err := io.CopyN(io.Discard, c, size); err != nil {
		t.Fatal(err)
	}
	// A busy machine makes the ratio smaller, never larger.
	if ratio := (size - atOnce) / (rate * time.Since(begin).Seconds()); ratio > 1 {
		t.Errorf("%d bytes came in %v: %.2f times what the settings give", size, time.Since(begin), ratio)
	}
	// At the old rate these would take longer than the deadline is away.
	change("bandwidth: {down: 1Gi}")
	if err := c.SetReadDeadline(time.Now().Add(4 * time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyN(io.Discard, c, 256<<20); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the settings have changed, and the sandbox goes on as before")
	} else if err != nil {
		t.Fatal(err)
	}
}
