package identity

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/guest/guestrpc"
)

// clockedGuest is an agent that only records the times that it is told.
type clockedGuest struct {
	guestrpc.Handler
	told   chan time.Time
	refuse error
}

func (g *clockedGuest) SetClock(_ context.Context, req *guestrpc.SetClockRequest) error {
	g.told <- req.WallClock
	return g.refuse
}

func dialClocked(t *testing.T, g *clockedGuest, capabilities ...string) *guestrpc.Client {
	t.Helper()
	ours, theirs := net.Pipe()
	go func() { _ = guestrpc.Serve(context.Background(), theirs, g, capabilities...) }()
	c, err := guestrpc.NewClient(t.Context(), ours)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// TestSetClock: an agent that can set its clock is told the time. An agent of an
// older AgentRun gets no request.
func TestSetClock(t *testing.T) {
	g := &clockedGuest{told: make(chan time.Time, 1)}
	before := time.Now()
	if err := SetClock(t.Context(), dialClocked(t, g, guestrpc.CanSetClock)); err != nil {
		t.Fatal(err)
	}
	if told := <-g.told; told.Before(before.Round(0)) || told.After(time.Now()) {
		t.Errorf("told %v, asked at %v", told, before)
	}
	if err := SetClock(t.Context(), dialClocked(t, g, "something else")); err != nil {
		t.Errorf("an agent that cannot: %v", err)
	}
	if len(g.told) > 0 {
		t.Error("an agent that cannot was asked nevertheless")
	}
	g.refuse = &guestrpc.Error{Code: guestrpc.CodePermissionDenied, Message: "no"}
	if err := SetClock(t.Context(), dialClocked(t, g, guestrpc.CanSetClock)); err == nil || !strings.Contains(err.Error(), "set the wall clock: ") {
		t.Errorf("an agent that refuses: %v", err)
	}
}
