package stack

import (
	"context"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
)

// manualClock advances on command. Unlike faketime's clock it does not wait for the
// functions of its timers, which may themselves wait for time to pass.
type manualClock struct {
	mu     sync.Mutex
	at     time.Duration
	timers map[*manualTimer]time.Duration
}

type manualTimer struct {
	clock *manualClock
	f     func()
}

func newManualClock() *manualClock { return &manualClock{timers: map[*manualTimer]time.Duration{}} }

func (c *manualClock) Now() time.Time { return time.Unix(0, 0) }

func (c *manualClock) NowMonotonic() tcpip.MonotonicTime {
	c.mu.Lock()
	defer c.mu.Unlock()
	return tcpip.MonotonicTime{}.Add(c.at)
}

func (c *manualClock) AfterFunc(d time.Duration, f func()) tcpip.Timer {
	t := &manualTimer{c, f}
	t.Reset(d)
	return t
}

func (t *manualTimer) Stop() bool {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	_, armed := t.clock.timers[t]
	delete(t.clock.timers, t)
	return armed
}

func (t *manualTimer) Reset(d time.Duration) {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	t.clock.timers[t] = t.clock.at + d
}

func (c *manualClock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at += d
	for t, due := range c.timers {
		if due <= c.at {
			delete(c.timers, t)
			go t.f()
		}
	}
}

// skippingClock is the real clock, in which time can be skipped.
type skippingClock struct {
	real tcpip.Clock

	mu      sync.Mutex
	skipped time.Duration
	timers  map[*skippingTimer]struct{}
}

type skippingTimer struct {
	clock *skippingClock
	f     func()
	real  tcpip.Timer
	due   tcpip.MonotonicTime
}

func newSkippingClock() *skippingClock {
	return &skippingClock{real: tcpip.NewStdClock(), timers: map[*skippingTimer]struct{}{}}
}

func (c *skippingClock) Now() time.Time { return c.real.Now() }

func (c *skippingClock) NowMonotonic() tcpip.MonotonicTime {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.real.NowMonotonic().Add(c.skipped)
}

func (c *skippingClock) AfterFunc(d time.Duration, f func()) tcpip.Timer {
	t := &skippingTimer{clock: c, f: f}
	t.Reset(d)
	return t
}

func (t *skippingTimer) Stop() bool {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	_, armed := t.clock.timers[t]
	delete(t.clock.timers, t)
	t.real.Stop()
	return armed
}

func (t *skippingTimer) Reset(d time.Duration) {
	c := t.clock
	c.mu.Lock()
	defer c.mu.Unlock()
	t.due = c.real.NowMonotonic().Add(c.skipped + d)
	c.timers[t] = struct{}{}
	if t.real != nil {
		t.real.Stop()
	}
	t.real = c.real.AfterFunc(d, t.fire)
}

func (t *skippingTimer) fire() {
	c := t.clock
	c.mu.Lock()
	_, armed := c.timers[t]
	armed = armed && !c.real.NowMonotonic().Add(c.skipped).Before(t.due)
	if armed {
		delete(c.timers, t)
	}
	c.mu.Unlock()
	if armed {
		t.f()
	}
}

// Skip advances the clock by d at once.
func (c *skippingClock) Skip(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.skipped += d
	for t := range c.timers {
		go t.fire()
		t.real.Stop()
		t.real = c.real.AfterFunc(max(0, t.due.Sub(c.real.NowMonotonic().Add(c.skipped))), t.fire)
	}
}

// TestClockStops: timers do not run while the clock stands still, and run for the
// rest of their time afterwards.
func TestClockStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newClock(nil)
		begin := c.NowMonotonic()
		now := func() time.Duration { return c.NowMonotonic().Sub(begin) }
		// Each timer sends when it has fired.
		early, late := make(chan time.Duration, 1), make(chan time.Duration, 1)
		c.AfterFunc(time.Second, func() { early <- now() })
		c.AfterFunc(10*time.Second, func() { late <- now() })
		stopped := c.AfterFunc(5*time.Second, func() { t.Error("a stopped timer fired") })

		time.Sleep(4 * time.Second)
		c.stop()
		time.Sleep(time.Hour)
		synctest.Wait()
		if !stopped.Stop() || stopped.Stop() {
			t.Error("a timer that is parked was not stopped once")
		}
		if now() != 4*time.Second || len(early) != 1 || len(late) != 0 {
			t.Errorf("it is %v, %d early and %d late timers have fired", now(), len(early), len(late))
		}
		c.start()
		c.start()
		time.Sleep(5 * time.Second)
		c.stop() // before the underlying timer comes due again
		time.Sleep(time.Millisecond)
		c.start()
		if at := <-late; at != 10*time.Second {
			t.Errorf("the late timer fired at %v", at)
		}

		c.stop()
		again := c.AfterFunc(time.Second, func() { late <- now() })
		time.Sleep(time.Minute)
		again.Reset(2 * time.Second)
		time.Sleep(time.Minute)
		c.start()
		if at := <-late; at != 12*time.Second {
			t.Errorf("a timer that was set again while it was parked fired at %v", at)
		}
	})
}

func TestBucket(t *testing.T) {
	clock := newManualClock()
	b := &bucket{rate: 1 << 20, clock: newClock(clock)}
	clock.Advance(time.Hour)
	if d := b.take(maxBurst); d != 0 {
		t.Errorf("the first bytes wait %v", d)
	}
	if d := b.take(1 << 19); d != 500*time.Millisecond {
		t.Errorf("half a second's bytes wait %v", d)
	}
	clock.Advance(250 * time.Millisecond)
	if d := b.take(0); d != 250*time.Millisecond {
		t.Errorf("after half of that %v are left", d)
	}
	clock.Advance(time.Hour)
	b.setRate(1 << 30)
	if d := b.take(1 << 30); d > time.Second || d < 900*time.Millisecond {
		t.Errorf("at a higher rate a second's bytes wait %v", d)
	}
	clock.Advance(time.Hour)
	b.take(0)
	b.setRate(1 << 20)
	if d := b.take(1<<20 + maxBurst); d != time.Second {
		t.Errorf("at a lower rate, which keeps less together, a second's bytes wait %v", d)
	}
}

// awaited is a Remote that expects a byte from the sandbox in time.
type awaited struct {
	paused <-chan struct{}
	in     time.Duration
	got    chan error
}

func (a *awaited) Splice(inside Conn) {
	<-a.paused
	err := inside.SetReadDeadline(time.Now().Add(a.in))
	if err == nil {
		_, err = inside.Read(make([]byte, 1))
	}
	a.got <- err
	_ = inside.Close()
}

func (*awaited) Close() error { return nil }

// remotes is an Outside with one Remote for all connections.
type remotes struct {
	loopback
	remote Remote
}

func (r *remotes) DialTCP(context.Context, netip.AddrPort, netip.AddrPort) (Remote, error) {
	return r.remote, nil
}

// TestPausedIsNotLate: deadlines of connections wait for a paused sandbox.
func TestPausedIsNotLate(t *testing.T) {
	p, g := newPoller(t), newGuest(t)
	paused := make(chan struct{})
	a := &awaited{paused, 10 * time.Millisecond, make(chan error, 1)}
	w := attach(t, p, g, &remotes{remote: a})
	c := g.mustDial(t, "tcp", "203.0.113.5:443")
	defer c.Close()
	w.Pause()
	close(paused)
	select {
	case err := <-a.got:
		t.Fatalf("while it was paused: %v", err)
	case <-time.After(20 * a.in): // gives a timer time to do harm, if it ran
	}
	c.Write([]byte("x"))
	if err := <-a.got; err != nil {
		t.Errorf("what it sent when it went on: %v", err)
	}
	w.Resume()
}
