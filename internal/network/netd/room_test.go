package netd_test

import (
	"errors"
	"testing"
	"time"

	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/networktest"
)

// TestNoDescriptorLeft: a netd without free descriptors refuses a wire with the
// reason, and serves other requests. With room again it accepts the wire.
func TestNoDescriptorLeft(t *testing.T) {
	path, _ := here(t, time.Minute)
	c := dial(t, path)
	_, far := networktest.NewWire(t)
	restore := networktest.NoDescriptors(t)
	if err := c.Attach(t.Context(), wireOf("w", rules()), far); !errors.Is(err, netctl.ErrBusy) {
		t.Errorf("attach: %v", err)
	}
	if _, err := c.List(t.Context()); err != nil {
		t.Errorf("the connection has not survived: %v", err)
	}
	restore()
	if err := c.Attach(t.Context(), wireOf("w", rules()), far); err != nil {
		t.Errorf("attach with room: %v", err)
	}
}
