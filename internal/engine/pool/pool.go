// Package pool keeps things ready that take long to make and little to hand out:
// ready sandboxes, spares. It knows nothing else about them.
//
// # Types
//
// An [Item] is a thing that waits. It may end by itself meanwhile. A [Config] says
// how many items wait, and has the functions that the pool calls: Make makes an item
// that is going to wait, Claim gives an item that waited to a request, Now makes an
// item for a request that finds none waiting. A [Pool] has a list of the items that
// wait, oldest first, and one goroutine that makes them. [Stats] counts what became
// of them.
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
// Nobody waits for an item: a Get that finds none calls Now at once, in the
// goroutine of its caller. So there is no queue here that would have to be fair.
// Make and Now themselves bound how much is made at once. The pool calls none of the
// functions under its lock.
package pool

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Item is a thing that waits.
type Item interface {
	// Done is closed when it has ended.
	Done() <-chan struct{}
	// Wait returns why it ended, once it has. That is never nil.
	Wait() error
	// Close ends it, or frees what is left of it.
	Close() error
}

// Config describes a pool of items of type T, for requests of type R. Only Get calls
// Claim and Now: a pool whose items are all got by Take has neither.
type Config[T Item, R any] struct {
	// What the items are called in errors.
	What string
	// Count is how many of them wait.
	Count int
	// Make makes an item that is going to wait. One goroutine calls it, with a
	// context that ends with the pool.
	Make func(context.Context) (T, error)
	// Claim gives an item that waited to a request. After an error the pool closes
	// the item, and the request gets another one.
	Claim func(context.Context, T, R) error
	// Now makes an item for a request that finds none waiting.
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
	holds   int        // while there are any, none is made
	waiting []*entry[T]
	stats   Stats // without Waiting
	closed  bool
	changed chan struct{} // closed and made anew with each change of the above
}

// entry is an item that waits.
type entry[T Item] struct {
	item  T
	stale bool          // to be replaced when another one is there
	left  chan struct{} // closed when the item does not wait any more
}

// New makes a pool and fills it in the background.
func New[T Item, R any](cfg Config[T, R]) *Pool[T, R] {
	ctx, cancel := context.WithCancel(context.Background()) //nolint:gosec // G118: Close calls it
	p := &Pool[T, R]{cfg: cfg, count: cfg.Count, cancel: cancel, look: make(chan struct{}, 1), changed: make(chan struct{})}
	p.work.Go(func() { p.fill(ctx) })
	return p
}

// Close ends the items that wait, and the one that is being made. Those that were
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

// Get returns an item for a request: one that waited, or one that is made now.
func (p *Pool[T, R]) Get(ctx context.Context, request R) (T, error) {
	for {
		item, ok := p.first()
		if !ok {
			break
		}
		err := p.cfg.Claim(ctx, item, request)
		p.Refill() // not before: to make the next one would slow this one down
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

// Take removes an item if one waits. Whoever took one calls Refill when it is time to
// make the next.
func (p *Pool[T, R]) Take() (item T, ok bool) {
	item, ok = p.first()
	if ok {
		p.record(func(s *Stats) { s.Taken++ })
	}
	return item, ok
}

// first removes the item that has waited longest, as it has settled the most. Stale
// items come last.
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

// remove takes an item off the list if it is there; the lock must be held.
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
