package agent

import (
	"sync"
	"time"
)

// countdown calls a function after the sandbox has run for some time.
//
// Where the monotonic clock also counts the time away, a timer fires as soon as the
// sandbox comes back. So the countdown counts in steps. A step that took far longer
// than it should have was interrupted, and counts only with its planned length. For
// each time away, at most one step is counted wrongly.
type countdown struct {
	fire  func()
	jumps bool

	mu      sync.Mutex // protects all following fields
	left    time.Duration
	step    time.Duration // planned length of the current step
	began   time.Time
	timer   *time.Timer
	stopped bool
}

const (
	// countdownStep is the longest step where clocks jump.
	countdownStep = time.Second
	// countdownSlack is how late a timer may be on a busy machine before the
	// sandbox is taken to have been away.
	countdownSlack = 250 * time.Millisecond
)

// startCountdown starts a countdown. jumps says that the clock also counts the time
// away.
func startCountdown(after time.Duration, jumps bool, fire func()) *countdown {
	c := &countdown{fire: fire, jumps: jumps, left: after}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.next()
	return c
}

// next sets the timer. The caller holds c.mu.
func (c *countdown) next() {
	c.step, c.began = c.left, time.Now()
	if c.jumps {
		c.step = min(c.left, countdownStep)
	}
	c.timer = time.AfterFunc(c.step, c.tick)
}

func (c *countdown) tick() {
	c.mu.Lock()
	if c.stopped {
		c.mu.Unlock()
		return
	}
	c.left -= ran(time.Since(c.began), c.step)
	if c.left > 0 {
		c.next()
		c.mu.Unlock()
		return
	}
	c.stopped = true
	c.mu.Unlock()
	c.fire()
}

// ran is how long the sandbox ran in a step of the given duration.
func ran(took, step time.Duration) time.Duration {
	if took > step+countdownSlack {
		return step
	}
	return took
}

// stop ends a countdown that has not fired yet.
func (c *countdown) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stopped = true
	c.timer.Stop()
}
