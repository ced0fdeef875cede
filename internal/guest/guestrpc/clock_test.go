package guestrpc

import (
	"errors"
	"io/fs"
	"testing"
	"time"
)

func TestSetClock(t *testing.T) {
	if MethodSetClock != 67 || MethodSetClock.streaming() || MethodSetClock.toGuest() != 0 || MethodSetClock.toHost() != 0 {
		t.Error("the number and kind of the call are part of the protocol")
	}
	g := newFakeGuest()
	c := start(t, g)
	to := time.Unix(1700000000, 5)
	if err := c.SetClock(testContext(t), SetClockRequest{WallClock: to}); err != nil {
		t.Fatal(err)
	}
	// A request that cannot be sent is refused here, and the session goes on.
	if err := c.SetClock(testContext(t), SetClockRequest{WallClock: time.Unix(-1, 0)}); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("a time before 1970: %v", err)
	}
	if err := c.Ping(testContext(t)); err != nil {
		t.Error(err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.clocks) != 1 || !g.clocks[0].Equal(to) {
		t.Errorf("the guest was set to %v", g.clocks)
	}
}
