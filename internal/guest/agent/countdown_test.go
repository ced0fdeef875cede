package agent

import (
	"testing"
	"time"
)

// TestRan: a step that took far longer than planned was interrupted, and counts with
// its planned length.
func TestRan(t *testing.T) {
	for _, tt := range []struct{ took, step, want time.Duration }{
		{time.Second, time.Second, time.Second},
		{time.Second + 100*time.Millisecond, time.Second, time.Second + 100*time.Millisecond},
		{time.Hour, time.Second, time.Second},
		{time.Hour, 10 * time.Millisecond, 10 * time.Millisecond},
	} {
		if got := ran(tt.took, tt.step); got != tt.want {
			t.Errorf("a step of %v that took %v counts %v, not %v", tt.step, tt.took, got, tt.want)
		}
	}
}

// TestCountdownAway: a countdown whose clock jumps goes on from where it was.
func TestCountdownAway(t *testing.T) {
	fired := make(chan struct{})
	c := startCountdown(time.Hour, true, func() { close(fired) })
	c.mu.Lock()
	if c.step != countdownStep {
		t.Errorf("the first step is %v", c.step)
	}
	c.timer.Stop()
	c.began = c.began.Add(-10 * time.Hour) // the sandbox was away
	c.mu.Unlock()
	c.tick()
	c.mu.Lock()
	if want := time.Hour - countdownStep; c.left != want || c.stopped {
		t.Errorf("%v are left, not %v", c.left, want)
	}
	c.left = countdownStep / 100
	c.next()
	c.mu.Unlock()
	<-fired
	c.stop() // it has fired already
}

func TestCountdownStops(t *testing.T) {
	for _, jumps := range []bool{false, true} {
		c := startCountdown(time.Hour, jumps, func() { t.Error("it fired") })
		c.stop()
		c.tick() // plays a timer that was under way
	}
	fired := make(chan struct{})
	startCountdown(time.Millisecond, false, func() { close(fired) })
	<-fired
}
