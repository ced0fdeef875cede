package jail

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

// budget manages the memory limit of one group. Captures raise the limit, because
// the files that they fill are charged to the group. The limit falls back to its
// base when the group's memory fits. It cannot fall earlier: cgroups v1 refuses a
// limit below the memory charged, and cgroups v2 kills.
type budget struct {
	mu    sync.Mutex // serializes changes of the limit; protects all following fields
	base  uint64     // the limit without captures; 0 until it is known
	extra uint64     // the additional memory that captures need now

	stop    chan struct{} // closed to end the goroutine that lowers the limit later; nil if it does not run
	settled chan struct{} // closed when that goroutine has ended
	closed  bool          // the limit must not be changed any more
}

// errInUse: more memory is charged than the new limit allows.
var errInUse = errors.New("more memory is in use")

const (
	// roomToFree: if a limit cannot be lowered to its target, it stays this far
	// above the memory in use, because its owner goes on allocating.
	roomToFree = 16 << 20
	// A limit that cannot be lowered now is tried again after firstRetry, then after
	// twice as long each time, up to lastRetry. Not every kind of cgroup has an
	// event for memory that is freed.
	firstRetry = time.Millisecond
	lastRetry  = 10 * time.Second
	// followAfter is the wait after which the limit follows the memory in use
	// down. By then the kernel has freed the memory that it was freeing at the
	// start; until then the owner keeps the whole raised limit.
	followAfter = time.Second
)

// is sets the base, the limit without captures.
func (b *budget) is(base uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.base = base
}

// extend raises the limit by some bytes until back is called. back fails only if the
// group cannot be read.
func (b *budget) extend(g group, bytes uint64) (back func() error, err error) {
	if err := b.change(g, bytes, 0); err != nil {
		return nil, err
	}
	return sync.OnceValue(func() error { return b.change(g, 0, bytes) }), nil
}

// restore sets the base and the limit of a group that was found.
func (b *budget) restore(g group, base uint64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.base = base
	return b.settle(g)
}

// change adjusts the need of captures and sets the limit. If the group is gone,
// or another process manages it, change does nothing.
func (b *budget) change(g group, more, less uint64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	if b.base == 0 { // the group was found, and its limit was not raised since
		_, limit, err := g.memory()
		if gone(err) {
			return nil
		}
		if err != nil {
			return err
		}
		b.base = limit
	}
	b.extra += more
	b.extra -= min(less, b.extra)
	err := b.settle(g)
	if err != nil {
		b.extra -= more
	}
	return err
}

// settle sets the limit to its target. If the limit cannot be lowered now, a
// goroutine lowers it later. The caller holds b.mu.
func (b *budget) settle(g group) error {
	err := b.adjust(g, false)
	switch {
	case gone(err):
		return nil
	case errors.Is(err, errInUse):
		if b.stop == nil && !b.closed {
			b.stop, b.settled = make(chan struct{}), make(chan struct{})
			go b.lowerLater(g, b.stop, b.settled)
		}
		return nil
	}
	return err
}

// adjust sets the limit to its target, or fails with errInUse. In that case, if
// follow is set, it lowers the limit as far as the memory in use permits. The
// caller holds b.mu.
func (b *budget) adjust(g group, follow bool) error {
	usage, limit, err := g.memory()
	if err != nil {
		return err
	}
	want := b.base + b.extra
	if want >= limit {
		if want == limit {
			return nil
		}
		return g.setMemory(want)
	}
	err = g.lowerMemory(want)
	if errors.Is(err, errInUse) && follow && usage+roomToFree < limit {
		err = errors.Join(err, g.lowerMemory(usage+roomToFree))
	}
	return err
}

// lowerLater tries again until the limit is at its target, the group is gone, or
// close was called.
func (b *budget) lowerLater(g group, stop <-chan struct{}, settled chan<- struct{}) {
	defer close(settled)
	for wait := firstRetry; ; wait = min(2*wait, lastRetry) {
		select {
		case <-stop:
			return
		case <-time.After(wait):
		}
		if b.lowered(g, stop, wait >= followAfter) {
			return
		}
	}
}

// lowered tries once, and reports whether the work is complete. It ignores all
// errors but errInUse: the next operation meets them again and reports them.
func (b *budget) lowered(g group, stop <-chan struct{}, follow bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.stop != stop {
		return true // close came first
	}
	if errors.Is(b.adjust(g, follow), errInUse) {
		return false
	}
	b.stop = nil
	return true
}

// close stops changing the limit, because the group is about to be removed or
// another process manages it from now on.
func (b *budget) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	if b.stop != nil {
		close(b.stop)
		b.stop = nil
	}
}

// limit sets other limits. The memory that captures need comes on top.
func (b *budget) limit(g group, l Limits) error {
	if err := l.check(); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	_, now, err := g.memory()
	if err != nil {
		return fmt.Errorf("set cgroup limits: %w", err)
	}
	b.base = l.Memory
	// Set all limits now, but do not lower memory: settle does that.
	l.Memory = max(now, b.base+b.extra)
	if err := g.set(l); err != nil {
		return err
	}
	return b.settle(g)
}
