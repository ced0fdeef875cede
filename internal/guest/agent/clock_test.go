package agent

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"agentrun.dev/internal/guest/guestrpc"
)

// TestSetClock: only the clock is set. Neither the identity nor the generation
// changes.
func TestSetClock(t *testing.T) {
	r, k := newTestRenewer(t)
	if err := r.SetClock(t.Context(), forkNow); err != nil {
		t.Fatal(err)
	}
	if k.clock.Nano() != forkNow.UnixNano() || k.log() != "set clock" || r.Generation() != 0 {
		t.Errorf("clock %v, calls %s, generation %d", k.clock, k.log(), r.Generation())
	}
	if err := expectFile(r.root+"/etc/hostname", "parent\n"); err != nil {
		t.Error(err)
	}
	for name, to := range map[string]time.Time{"none": {}, "1970": time.Unix(0, 0), "before": time.Unix(-1, 0)} {
		if err := r.SetClock(t.Context(), to); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	k.fail["set clock"] = syscall.EPERM
	if err := r.SetClock(t.Context(), forkNow); err == nil || !strings.Contains(err.Error(), "set wall clock") {
		t.Errorf("a kernel that refuses: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.SetClock(ctx, forkNow); !errors.Is(err, context.Canceled) {
		t.Errorf("a host that has gone: %v", err)
	}
	// The host's own clock is only checked.
	r.hosts = true
	if err := r.SetClock(t.Context(), time.Now()); err != nil {
		t.Error(err)
	}
	if err := r.SetClock(t.Context(), time.Now().Add(-time.Hour)); !errors.Is(err, ErrIO) {
		t.Errorf("an hour off: %v", err)
	}
}

// TestSetClockOverRPC: the agent reports that it can set the clock, and does. An
// agent that is not PID 1 sets nothing.
func TestSetClockOverRPC(t *testing.T) {
	r, k := newTestRenewer(t)
	c, _ := dialServer(t, serve(t, &Server{Renewer: r}))
	if !c.Can(guestrpc.CanSetClock) {
		t.Errorf("the agent says that it can %q", c.Capabilities())
	}
	if err := c.SetClock(rpcContext(t), guestrpc.SetClockRequest{WallClock: forkNow}); err != nil || k.log() != "set clock" {
		t.Errorf("%v, calls %s", err, k.log())
	}
	other, _ := dialServer(t, serve(t, &Server{}))
	if err := other.SetClock(rpcContext(t), guestrpc.SetClockRequest{WallClock: forkNow}); err == nil {
		t.Error("the clock was set by an agent that is not PID 1")
	}
}
