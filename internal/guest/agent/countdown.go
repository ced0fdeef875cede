package agent

import (
	"sync"
	"time"
)

// countdown calls a function when the sandbox has run for some time.
//
// Where the monotonic clock jumps over the time away, a timer fires at once
// when the sandbox comes back. So time is counted in steps: a step that took
// far longer than it should have was interrupted, and counts once. At most one
// step is counted wrongly for each time away.
type countdown struct {
	fire  func()
	jumps bool

	mu      sync.Mutex // protects all following fields
	left    time.Duration
	step    time.Duration // that the timer was set to
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

// startCountdown starts one; jumps says that the clock counts the time away.
func startCountdown(after time.Duration, jumps bool, fire func()) *countdown {
	c := &countdown{fire: fire, jumps: jumps, left: after}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.next()
	return c
}

// next sets the timer; the lock must be held.
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

// ran is for how long the sandbox ran in a step that took so long.
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
