package egress

import (
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
)

// TestInjectMemory: the memory of HTTP/2 connections is taken from that of all
// connections. Without memory a connection is refused with the reason, and a request
// is answered with 503.
func TestInjectMemory(t *testing.T) {
	n := newInjecting(t, allow("allowed.example:443"))
	n.memory = new(atomic.Int64)
	t.Cleanup(func() { // after all connections have ended
		if left := n.memory.Load(); left != 0 {
			t.Errorf("%d bytes are still taken", left)
		}
	})
	get := func(c *http.Client) (int, error) {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://allowed.example/", nil)
		if err != nil {
			return 0, err
		}
		r, err := c.Do(request)
		if err != nil {
			return 0, err
		}
		_, _ = io.Copy(io.Discard, r.Body)
		return r.StatusCode, r.Body.Close()
	}
	first := n.client(t, true)
	if status, err := get(first); err != nil || status != http.StatusOK {
		t.Fatalf("a request: %d, %v", status, err)
	}
	if got := n.memory.Load(); got < tlsMemory+http2Memory || got > tlsMemory+http2Memory+requestMemory {
		t.Errorf("%d bytes are counted, at least %d are used", got, tlsMemory+http2Memory)
	}
	if _, err := get(n.client(t, true)); err == nil {
		t.Error("there is memory for one connection, and two are served")
	}
	for { // the log has the reason once the sandbox was answered
		changed := n.sandbox.LogChanged()
		if slices.ContainsFunc(n.sandbox.Log(0, 100), func(e Entry) bool { return strings.Contains(e.Reason, "memory") }) {
			break
		}
		<-changed
	}
	n.memory.Add(testMemory)
	if status, err := get(first); err != nil || status != http.StatusServiceUnavailable {
		t.Errorf("a request without memory: %d, %v", status, err)
	}
	n.memory.Add(-testMemory)
}
