package virtio

import (
	"sync"
	"testing"
	"time"
)

// clock is a time that advances only when the test moves it.
type clock struct {
	mu    sync.Mutex // protects the following
	at    time.Time
	waits []time.Duration
	calls []func()
}

// throttled is a throttle on a clock of its own.
func throttled(r Rate) (*throttle, *clock) {
	c := &clock{at: time.Unix(1000, 0)}
	t := newThrottle(r)
	t.now = func() time.Time {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.at
	}
	t.after = func(d time.Duration, f func()) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.waits, c.calls = append(c.waits, d), append(c.calls, f)
	}
	return t, c
}

func (c *clock) move(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(d)
}

// last returns the last scheduled call and its delay.
func (c *clock) last() (time.Duration, func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.waits[len(c.waits)-1], c.calls[len(c.calls)-1]
}

// serve serves requests of a size until the throttle refuses, and returns their
// number.
func serve(t *throttle, size uint64, retry func()) (n int) {
	for n < 1000 && t.admit(retry) {
		t.spend(size)
		n++
	}
	return n
}

func TestThrottle(t *testing.T) {
	nobody := func() {}
	if n := serve(newThrottle(Rate{}), 1<<40, nobody); n != 1000 {
		t.Errorf("without a limit %d requests were served", n)
	}
	// First a second's worth, then as much as the time allows.
	th, c := throttled(Rate{Ops: 10})
	if n := serve(th, 1<<40, nobody); n != 10 {
		t.Errorf("at first %d requests, not 10", n)
	}
	c.move(500 * time.Millisecond)
	if n := serve(th, 0, nobody); n != 5 {
		t.Errorf("after half a second %d requests, not 5", n)
	}
	c.move(time.Hour)
	if n := serve(th, 0, nobody); n != 10 {
		t.Errorf("after an hour %d requests, not 10", n)
	}
	// A request larger than the bucket is served; later ones wait for its debt.
	th, c = throttled(Rate{Bytes: 1000})
	if n := serve(th, 5000, nobody); n != 1 {
		t.Errorf("%d large requests, not 1", n)
	}
	c.move(3999 * time.Millisecond)
	if th.admit(nobody) {
		t.Error("served before it was paid for")
	}
	c.move(2 * time.Millisecond)
	if !th.admit(nobody) {
		t.Error("not served when it was paid for")
	}
	// Both limits hold.
	th, _ = throttled(Rate{Bytes: 1000, Ops: 3})
	if n := serve(th, 1, nobody); n != 3 {
		t.Errorf("%d requests, not 3", n)
	}
	th, _ = throttled(Rate{Bytes: 1000, Ops: 300})
	if n := serve(th, 100, nobody); n != 10 {
		t.Errorf("%d requests, not 10", n)
	}
}

// TestThrottleCallsBack: after a refusal, retry is called once, when there is
// room.
func TestThrottleCallsBack(t *testing.T) {
	th, c := throttled(Rate{Bytes: 1000})
	called := 0
	retry := func() { called++ }
	serve(th, 3000, retry)
	th.admit(retry)
	th.admit(retry)
	if len(c.calls) != 1 || c.waits[0] < 2*time.Second || c.waits[0] > 2*time.Second+time.Millisecond {
		t.Fatalf("%d calls are to come, after %v", len(c.calls), c.waits)
	}
	c.move(c.waits[0])
	c.calls[0]()
	if called != 1 || !th.admit(retry) {
		t.Errorf("called %d times, and then refused", called)
	}
	// Even after a debt of years, the bucket is looked at again within a
	// minute.
	th.spend(1 << 62)
	th.admit(retry)
	if got := c.waits[len(c.waits)-1]; got > maxWait+time.Second {
		t.Errorf("the next look is after %v", got)
	}
	// If the clock goes backwards, the throttle admits no more, and little is
	// lost.
	th, c = throttled(Rate{Ops: 1})
	serve(th, 0, retry)
	c.move(-time.Hour)
	if th.admit(retry) {
		t.Error("a clock that went backwards gave tokens")
	}
}

// TestBlockRate: a disk with a limit serves as many requests as it may, leaves
// the rest in the ring, and continues by itself.
func TestBlockRate(t *testing.T) {
	d := newDisk(64)
	b := NewBlock(BlockConfig{Disk: d, Rate: Rate{Bytes: 4 * SectorSize}})
	th, c := throttled(Rate{Bytes: 4 * SectorSize})
	refused := make(chan struct{}, 1)
	later := th.after
	th.after = func(d time.Duration, f func()) { later(d, f); refused <- struct{}{} }
	b.throttle = th
	g := startGuest(t, b)
	for range 4 {
		if status, _ := g.request(g.out(blkHeader(blkIn, 0)), g.in(SectorSize), g.in(1)); status != blkOK {
			t.Fatalf("status %d", status)
		}
	}
	g.send(0, g.out(blkHeader(blkIn, 1)), g.in(SectorSize), g.in(1))
	<-refused
	if got := b.Stats(); got.Requests != 4 {
		t.Fatalf("%d requests were served, not 4", got.Requests)
	}
	wait, call := c.last()
	c.move(wait)
	call()
	g.wait(0)
	// Zeros cost as much as the bytes that may have to be written.
	before := b.Stats().WrittenBytes
	c.move(time.Hour)
	if status, _ := g.request(g.out(blkHeader(blkWriteZeroesRq, 0)), g.out(blkSegment(0, 8, 0)), g.in(1)); status != blkOK {
		t.Fatalf("write zeroes: status %d", status)
	}
	if got := b.Stats().WrittenBytes - before; got != 8*SectorSize {
		t.Errorf("zeros counted as %d bytes", got)
	}
}
