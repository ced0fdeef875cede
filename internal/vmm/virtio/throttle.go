package virtio

import (
	"sync/atomic"
	"time"
)

// Rate bounds a device's work per second; 0 is unlimited. Unused capacity can
// be used later, up to a second's worth.
type Rate struct {
	Bytes, Ops uint64
}

// throttle is a pair of token buckets. A request is served if neither bucket is
// empty, and then pays its full cost, even if that is more than a bucket holds.
// So a request larger than a second's worth is served, and later requests wait
// for its debt. Requests that wait stay in the ring, where a capture finds
// them.
//
// Its state is not saved: a restored device begins with full buckets.
type throttle struct {
	bytes, ops bucket
	now        func() time.Time
	after      func(time.Duration, func()) // calls a function later
	waiting    atomic.Bool                 // a call of retry is scheduled
}

func newThrottle(r Rate) *throttle {
	if r == (Rate{}) {
		return nil
	}
	t := &throttle{now: time.Now, after: func(d time.Duration, f func()) { time.AfterFunc(d, f) }}
	t.bytes, t.ops = bucket{rate: float64(r.Bytes)}, bucket{rate: float64(r.Ops)}
	return t
}

// admit reports whether a request may be served now. If not, it calls retry
// when one may be.
func (t *throttle) admit(retry func()) bool {
	if t == nil {
		return true
	}
	now := t.now()
	d := max(t.bytes.wait(now), t.ops.wait(now))
	if d == 0 {
		return true
	}
	if !t.waiting.Swap(true) { // a guest can ask any number of times, but one call is enough
		t.after(d, func() {
			t.waiting.Store(false)
			retry()
		})
	}
	return false
}

// spend takes the cost of a request from the buckets.
func (t *throttle) spend(bytes uint64) {
	if t != nil {
		t.bytes.level -= float64(bytes)
		t.ops.level--
	}
}

// bucket fills at a rate, up to a second's worth.
type bucket struct {
	rate  float64 // 0: never empty
	level float64
	last  time.Time // when it was filled; zero: full
}

// wait fills the bucket and returns how long it will be empty.
func (b *bucket) wait(now time.Time) time.Duration {
	if b.rate == 0 {
		return 0
	}
	if b.last.IsZero() {
		b.level = b.rate
	} else {
		b.level = min(b.rate, b.level+b.rate*now.Sub(b.last).Seconds())
	}
	b.last = now
	if b.level > 0 {
		return 0
	}
	// Round up, and limit the time, so that a wrong clock cannot stop a disk.
	seconds := min(-b.level/b.rate, maxWait.Seconds())
	return time.Duration(seconds*float64(time.Second)) + time.Microsecond
}

// maxWait bounds the time until an empty bucket is looked at again.
const maxWait = time.Minute
