package jail

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

// budget is the limit of memory of one group. Captures raise it, since the files
// that they fill are charged to the group. It goes back to its base when the
// group's memory fits: a limit below what is charged is refused by cgroups v1, and
// kills on v2.
type budget struct {
	mu    sync.Mutex // serializes changes of the limit; protects all following fields
	base  uint64     // the limit without captures; 0 until it is known
	extra uint64     // what captures need now

	stop    chan struct{} // closed to end the goroutine that lowers the limit later; nil if there is none
	settled chan struct{} // closed when that goroutine has ended
	closed  bool          // the limit is not changed any more
}

// errInUse says that more memory is charged than a limit would allow.
var errInUse = errors.New("more memory is in use")

const (
	// roomToFree is how far above the memory in use a limit stays that cannot be
	// lowered to where it belongs: its owner goes on allocating.
	roomToFree = 16 << 20
	// A limit that cannot be lowered now is tried again after firstRetry, then after
	// twice as long each time, up to lastRetry. There is no event for memory that
	// becomes less on every kind of cgroup.
	firstRetry = time.Millisecond
	lastRetry  = 10 * time.Second
	// followAfter is the wait from which on the limit follows the memory in use
	// down. Memory that the kernel is just freeing is gone before, and its owner has
	// all of its own meanwhile.
	followAfter = time.Second
)

// is says what the limit is without captures.
func (b *budget) is(base uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.base = base
}

// extend raises the limit by some bytes, until back is called. back fails only if the
// group cannot be looked at.
func (b *budget) extend(g group, bytes uint64) (back func() error, err error) {
	if err := b.change(g, bytes, 0); err != nil {
		return nil, err
	}
	return sync.OnceValue(func() error { return b.change(g, 0, bytes) }), nil
}

// restore says what the limit is without captures, of a group that was found, and sets
// it.
func (b *budget) restore(g group, base uint64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.base = base
	return b.settle(g)
}

// change counts what captures need more, or less, and sets the limit. For a group
// that is gone, or left to others, that is nothing.
func (b *budget) change(g group, more, less uint64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	if b.base == 0 { // it was found; nothing has raised its limit since
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

// settle sets the limit to what it is meant to be. What cannot be lowered now is
// lowered later. The caller holds b.mu.
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

// adjust sets the limit to what it is meant to be, or fails with errInUse. Then a
// limit that follows is lowered as far as the memory in use permits. The caller
// holds b.mu.
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

// lowerLater tries again until the limit is what it is meant to be, the group is
// gone, or nobody wants it any more.
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

// lowered tries once, and reports whether there is nothing more to do. Failures
// that are not for want of memory are met again by the next operation, which
// reports them.
func (b *budget) lowered(g group, stop <-chan struct{}, follow bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.stop != stop {
		return true // close was faster
	}
	if errors.Is(b.adjust(g, follow), errInUse) {
		return false
	}
	b.stop = nil
	return true
}

// close leaves the limit to others: the group is to be removed, or another process
// looks after it from now on.
func (b *budget) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	if b.stop != nil {
		close(b.stop)
		b.stop = nil
	}
}

// limit gives a group other limits, with what captures need on top of them.
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
	// Others than memory at once, and memory if it is raised.
	l.Memory = max(now, b.base+b.extra)
	if err := g.set(l); err != nil {
		return err
	}
	return b.settle(g)
}
