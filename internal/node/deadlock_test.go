package node

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// gatedHost is a host on which the removal of a machine waits for the test.
type gatedHost struct {
	*nodetest.Host
	begun chan struct{}
	gate  atomic.Pointer[chan struct{}] // of the next removal
}

func (h *gatedHost) Remove(ctx context.Context, folder string) error {
	if gate := h.gate.Swap(nil); gate != nil {
		close(h.begun)
		<-*gate
	}
	return h.Host.Remove(ctx, folder)
}

// TestDeathInThePool: a machine that ends while it waits in its pool is cleared
// away. Calls that read the pool, or delete another one, do not wait for that.
func TestDeathInThePool(t *testing.T) {
	h := &gatedHost{Host: nodetest.NewHost(t)}
	m := daemon(t, t.TempDir(), h.Host, func(c *Config) { c.Engine = h })
	must(t, second(m.ApplyTemplate(t.Context(), key("python"), sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib})),
		second(m.ApplyPool(t.Context(), key("pool"), sandbox.PoolSpec{Template: "python", Replicas: 1})),
		second(m.ApplyPool(t.Context(), key("other"), sandbox.PoolSpec{Template: "python"})))
	must(t, m.WaitPool(t.Context(), key("pool")), m.WaitPool(t.Context(), key("other")))
	must(t, m.pools[key("pool")].current.ready.WaitFull(t.Context()))
	gate := make(chan struct{})
	h.begun = make(chan struct{})
	h.gate.Store(&gate)
	h.End(h.Folders()[0], engine.ErrEnded)
	<-h.begun // it is being cleared away
	done := make(chan error, 2)
	go func() { _, _, err := m.Pool(t.Context(), key("pool")); done <- err }()
	go func() { done <- m.DeletePool(t.Context(), key("other")) }()
	for range 2 {
		select {
		case err := <-done:
			must(t, err)
		case <-time.After(10 * time.Second):
			t.Fatal("who asks for a pool waits until a machine of it is cleared away")
		}
	}
	close(gate)
	must(t, m.Close())
}
