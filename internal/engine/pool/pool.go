// Package pool keeps things ready that take long to make and little time to hand out:
// ready sandboxes, spares. It knows nothing else about them.
//
// # Types
//
// An [Item] is a thing that waits. It may end by itself while it waits. A [Config]
// says how many items wait, and has the functions that the pool calls: Make makes an
// item that will wait, Claim hands a waiting item to a request, and Now makes an item
// for a request when no item waits. A [Pool] has a list of the items that wait,
// oldest first, and one goroutine that makes them. [Stats] counts the items by how
// they left the pool.
//
// # Data flow
//
//	Make ───► items that wait ───► Get (Claim), Take ───► the caller
//	                │                                         ▲
//	                │ ended, surplus,                         │
//	                ▼ Claim failed                            │
//	           Item.Close           no item waits: Get (Now) ─┘
//
// The goroutine calls Make until enough items wait, one after the other, and tries
// again some time after a failure. It looks again when an item has ended, when Get
// has handed one out, and when Refill, Renew, Resize or the release of a Hold tells
// it to.
//
// An item belongs to the pool from the end of Make until Get or Take returns it, and
// then to the caller. The pool closes the items that it does not hand out.
//
// No request waits for an item: if no item waits, Get calls Now at once, in the
// goroutine of its caller. So the pool needs no fair queue. Make and Now themselves
// bound how much is made at once. The pool never calls these functions under its
// lock.
package pool

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Item is a thing that waits.
type Item interface {
	// Done is closed once the item has ended.
	Done() <-chan struct{}
	// Wait blocks until the item has ended, and returns the reason, which is never
	// nil.
	Wait() error
	// Close ends the item, or frees its remains if it has ended.
	Close() error
}

// Config describes a pool of items of type T, for requests of type R. Only Get calls
// Claim and Now. A pool whose items are all got by Take may leave both nil.
type Config[T Item, R any] struct {
	// What is the name of the items in errors.
	What string
	// Count is how many items wait.
	Count int
	// Make makes an item that will wait. One goroutine calls it, with a context that
	// ends with the pool.
	Make func(context.Context) (T, error)
	// Claim hands a waiting item to a request. After an error the pool closes the
	// item, and the request gets another one.
	Claim func(context.Context, T, R) error
	// Now makes an item for a request when no item waits.
	Now func(context.Context, R) (T, error)
}

// Pool keeps items ready. Its methods are safe for concurrent use.
type Pool[T Item, R any] struct {
	cfg    Config[T, R]
	cancel context.CancelFunc
	work   sync.WaitGroup // the pool's goroutines
	look   chan struct{}  // holds at most one notice that items may be missing

	mu      sync.Mutex // protects all following fields
	count   int        // how many items are to wait
	holds   int        // while it is above zero, no item is made
	waiting []*entry[T]
	stats   Stats // Waiting is not kept here
	closed  bool
	changed chan struct{} // closed and made anew with each change of the above
}

// entry is an item that waits.
type entry[T Item] struct {
	item  T
	stale bool          // to be replaced once another item is ready
	left  chan struct{} // closed when the item no longer waits
}

// New makes a pool and fills it in the background.
func New[T Item, R any](cfg Config[T, R]) *Pool[T, R] {
	ctx, cancel := context.WithCancel(context.Background()) //nolint:gosec // G118: Close calls it
	p := &Pool[T, R]{cfg: cfg, count: cfg.Count, cancel: cancel, look: make(chan struct{}, 1), changed: make(chan struct{})}
	p.work.Go(func() { p.fill(ctx) })
	return p
}

// Close ends the items that wait, and the item that is being made. Items that were
// handed out are not touched.
func (p *Pool[T, R]) Close() error {
	p.cancel()
	p.mu.Lock()
	p.closed = true
	waiting := p.waiting
	p.waiting = nil
	p.notify()
	p.mu.Unlock()
	var errs []error
	for _, e := range waiting {
		close(e.left)
		errs = append(errs, e.item.Close())
	}
	p.work.Wait()
	return errors.Join(errs...)
}

// Get returns an item for a request: one that has waited, or one that is made now.
func (p *Pool[T, R]) Get(ctx context.Context, request R) (T, error) {
	for {
		item, ok := p.first()
		if !ok {
			break
		}
		err := p.cfg.Claim(ctx, item, request)
		p.Refill() // only after the claim: making the next item would slow this one down
		if err == nil {
			p.record(func(s *Stats) { s.Taken++ })
			return item, nil
		}
		err = errors.Join(err, item.Close())
		if ctx.Err() != nil {
			var none T
			return none, fmt.Errorf("claim one of the %s: %w", p.cfg.What, err)
		}
		p.record(func(s *Stats) { s.lose(err) })
	}
	p.record(func(s *Stats) { s.MadeNow++ })
	return p.cfg.Now(ctx, request)
}

// Take removes an item if one waits. The caller calls Refill when it is time to make
// the next one.
func (p *Pool[T, R]) Take() (item T, ok bool) {
	item, ok = p.first()
	if ok {
		p.record(func(s *Stats) { s.Taken++ })
	}
	return item, ok
}

// first removes the item that has waited longest, since it has settled the most.
// Stale items come last.
func (p *Pool[T, R]) first() (item T, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.waiting) == 0 {
		return item, false
	}
	first := p.waiting[0]
	for _, e := range p.waiting {
		if !e.stale {
			first = e
			break
		}
	}
	p.remove(first)
	close(first.left)
	return first.item, true
}

// remove takes an item off the list if it is there. The caller holds p.mu.
func (p *Pool[T, R]) remove(e *entry[T]) bool {
	for i, other := range p.waiting {
		if other == e {
			p.waiting = append(p.waiting[:i:i], p.waiting[i+1:]...)
			p.notify()
			return true
		}
	}
	return false
}
