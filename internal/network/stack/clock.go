package stack

import (
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
)

// clock is a clock that can be stopped, for sandboxes that are paused. Their
// connections must not time out. Nor should the backoff of retransmissions have grown
// to minutes when they continue.
type clock struct {
	real tcpip.Clock

	// mu protects all following fields.
	mu sync.Mutex
	// lost is the total time that the clock stood still, without the present stop.
	lost time.Duration
	// stopped is whether the clock stands still, and since is when it stopped.
	stopped bool
	since   tcpip.MonotonicTime
	// parked are the timers that were due while the clock stood still.
	parked map[*timer]struct{}
}

func newClock(real tcpip.Clock) *clock {
	if real == nil {
		real = tcpip.NewStdClock()
	}
	return &clock{real: real}
}

// Now implements tcpip.Clock. It is the time of day, which does not stop.
func (c *clock) Now() time.Time { return c.real.Now() }

// NowMonotonic implements tcpip.Clock.
func (c *clock) NowMonotonic() tcpip.MonotonicTime {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now()
}

// now is NowMonotonic; the caller holds c.mu.
func (c *clock) now() tcpip.MonotonicTime {
	if c.stopped {
		return c.since.Add(-c.lost)
	}
	return c.real.NowMonotonic().Add(-c.lost)
}

// AfterFunc implements tcpip.Clock.
func (c *clock) AfterFunc(d time.Duration, f func()) tcpip.Timer {
	t := &timer{clock: c, f: f}
	c.mu.Lock()
	defer c.mu.Unlock()
	t.due, t.armed = c.now().Add(d), true
	t.real = c.real.AfterFunc(d, t.fire)
	return t
}

func (c *clock) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.stopped {
		c.stopped, c.since = true, c.real.NowMonotonic()
	}
}

func (c *clock) start() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.stopped {
		return
	}
	c.lost += c.real.NowMonotonic().Sub(c.since)
	c.stopped = false
	for t := range c.parked {
		t.real.Reset(max(0, t.due.Sub(c.now())))
	}
	c.parked = nil
}

// timer is a timer of a clock. The real timer below it does not know about stops:
// when it fires too early, it is set again.
type timer struct {
	clock *clock
	f     func()
	real  tcpip.Timer
	// clock.mu protects the following fields.
	due   tcpip.MonotonicTime
	armed bool
}

func (t *timer) fire() {
	t.clock.mu.Lock()
	if !t.armed {
		t.clock.mu.Unlock()
		return
	}
	if left := t.due.Sub(t.clock.now()); left > 0 {
		if t.clock.stopped {
			if t.clock.parked == nil {
				t.clock.parked = map[*timer]struct{}{}
			}
			t.clock.parked[t] = struct{}{}
		} else {
			t.real.Reset(left)
		}
		t.clock.mu.Unlock()
		return
	}
	t.armed = false
	t.clock.mu.Unlock()
	t.f()
}

// Stop implements tcpip.Timer.
func (t *timer) Stop() bool {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	was := t.armed
	t.armed = false
	delete(t.clock.parked, t)
	t.real.Stop()
	return was
}

// Reset implements tcpip.Timer.
func (t *timer) Reset(d time.Duration) {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	delete(t.clock.parked, t)
	t.due, t.armed = t.clock.now().Add(d), true
	t.real.Reset(d)
}

// bucket is a token bucket of bytes. A debt must be paid before more bytes pass.
type bucket struct {
	clock *clock

	// mu protects all following fields.
	mu   sync.Mutex
	rate int64
	// tokens are the bytes that may pass at once. A negative number is a debt.
	tokens float64
	last   tcpip.MonotonicTime
}

// maxBurst is how many bytes pass at once after silence: two of the largest frames.
const maxBurst = 2 << 16

// take takes n bytes and returns how long to wait before the next ones pass.
func (b *bucket) take(n int) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.pay(n)
}

// setRate changes the rate from now on: what has come together before stays, as far as the
// new rate lets it.
func (b *bucket) setRate(rate int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.pay(0)
	b.rate = rate
	b.pay(0)
}

// pay is take; the caller holds b.mu.
func (b *bucket) pay(n int) time.Duration {
	rate := float64(b.rate)
	now := b.clock.NowMonotonic()
	b.tokens = min(b.tokens+rate*now.Sub(b.last).Seconds(), max(maxBurst, rate/20))
	b.tokens -= float64(n)
	b.last = now
	if b.tokens >= 0 {
		return 0
	}
	return time.Duration(-b.tokens / rate * float64(time.Second))
}
