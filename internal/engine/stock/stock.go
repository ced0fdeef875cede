// Package stock keeps things waiting that take long to make: a few are made
// ahead, one that is taken or ends by itself is replaced in the background.
package stock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// Item is something that waits.
type Item interface {
	comparable
	// Done is closed when it has ended, and Wait says how.
	Done() <-chan struct{}
	Wait() error
	// Close ends it, or frees what is left of it.
	Close() error
}

// Config describes a stock.
type Config[T Item] struct {
	// What the items are called in errors.
	What string
	// Count is how many of them wait.
	Count int
	// Make makes one.
	Make func(context.Context) (T, error)
}

// Stats describes a stock.
type Stats struct {
	// Waiting is how many items are there now.
	Waiting int `json:"waiting"`
	// Lost counts items that ended while they waited.
	Lost uint64 `json:"lost"`
	// Failed counts attempts to make one, and LastError is why the last failed
	// or the last one was lost.
	Failed    uint64 `json:"failed"`
	LastError string `json:"last_error,omitempty"`
}

// Stock is a number of items that wait. Its methods are safe for concurrent
// use.
type Stock[T Item] struct {
	cfg    Config[T]
	cancel context.CancelFunc
	done   sync.WaitGroup
	missed chan struct{} // holds at most one notice to look again

	mu      sync.Mutex // protects all following fields
	count   int        // how many are to wait
	holds   int        // while there are any, none is made
	waiting []*waiting[T]
	stats   Stats
	closed  bool
	changed chan struct{} // closed and made anew with each change of the above
}

type waiting[T Item] struct {
	item  T
	stale bool          // to be replaced when another one is there
	taken chan struct{} // closed when it does not wait any more
}

// New makes a stock and fills it in the background.
func New[T Item](cfg Config[T]) *Stock[T] {
	ctx, cancel := context.WithCancel(context.Background()) //nolint:gosec // G118: Close calls it
	s := &Stock[T]{cfg: cfg, count: cfg.Count, cancel: cancel, missed: make(chan struct{}, 1), changed: make(chan struct{})}
	s.done.Go(func() { s.fill(ctx) })
	return s
}

// Close ends the items that wait. Those that were taken are not touched.
func (s *Stock[T]) Close() error {
	s.cancel()
	s.mu.Lock()
	s.closed = true
	left := s.waiting
	s.waiting = nil
	s.tell()
	s.mu.Unlock()
	var errs []error
	for _, w := range left {
		close(w.taken)
		errs = append(errs, w.item.Close())
	}
	s.done.Wait()
	return errors.Join(errs...)
}

// Stats describes the stock as it is now.
func (s *Stock[T]) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now()
}

// now describes the stock; the lock must be held.
func (s *Stock[T]) now() Stats {
	st := s.stats
	st.Waiting = len(s.waiting)
	return st
}

// tell wakes those who wait for a change; the lock must be held.
func (s *Stock[T]) tell() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// WaitFull waits until all items are there, and none is stale.
func (s *Stock[T]) WaitFull(ctx context.Context) error {
	return s.WaitUntil(ctx, func(Stats) bool { return !s.wanting() })
}

// WaitUntil waits until the stock is as it should be. It calls good without a
// lock.
func (s *Stock[T]) WaitUntil(ctx context.Context, good func(Stats) bool) error {
	for {
		s.mu.Lock()
		st, changed := s.now(), s.changed
		s.mu.Unlock()
		if good(st) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			if st.LastError != "" {
				return fmt.Errorf("wait for %s: %w (the last one failed: %s)", s.cfg.What, ctx.Err(), st.LastError)
			}
			return fmt.Errorf("wait for %s: %w", s.cfg.What, ctx.Err())
		}
	}
}

// Take removes an item, if there is one: the one that waits for the longest, as
// it has settled the most, but rather one that is not stale. Whoever has taken
// one calls Refill when it is the time to make the next.
func (s *Stock[T]) Take() (item T, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.waiting) == 0 {
		return item, false
	}
	first := s.waiting[0]
	for _, w := range s.waiting {
		if !w.stale {
			first = w
			break
		}
	}
	s.remove(first)
	close(first.taken)
	return first.item, true
}

// remove takes one off the list, if it is there; the lock must be held.
func (s *Stock[T]) remove(w *waiting[T]) bool {
	for i, other := range s.waiting {
		if other == w {
			s.waiting = append(s.waiting[:i:i], s.waiting[i+1:]...)
			s.tell()
			return true
		}
	}
	return false
}

// Refill makes what is missing, in the background.
func (s *Stock[T]) Refill() {
	select {
	case s.missed <- struct{}{}:
	default:
	}
}

// Refuse counts an item that was taken and found to be of no use, and why.
func (s *Stock[T]) Refuse(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lose(err)
}

// lose counts a loss; the lock must be held.
func (s *Stock[T]) lose(err error) {
	s.stats.Lost++
	s.stats.LastError = err.Error()
	s.tell()
}

// Renew replaces the items that wait now, one after the other; they can be taken
// until then.
func (s *Stock[T]) Renew() {
	s.mu.Lock()
	for _, w := range s.waiting {
		w.stale = true
	}
	s.mu.Unlock()
	s.Refill()
}

// Resize changes how many items wait. What is too many ends, the stale and the
// youngest first: they have settled the least.
func (s *Stock[T]) Resize(count int) {
	s.mu.Lock()
	s.count = count
	s.shrink()
	s.mu.Unlock()
	s.Refill()
}

// shrink ends the items that are too many; the lock must be held.
func (s *Stock[T]) shrink() {
	for len(s.waiting) > s.count {
		last := s.waiting[len(s.waiting)-1]
		for _, w := range s.waiting {
			if w.stale {
				last = w
				break
			}
		}
		s.discard(last)
	}
}

// discard ends an item that waits; the lock must be held.
func (s *Stock[T]) discard(w *waiting[T]) {
	s.remove(w)
	close(w.taken)
	s.done.Go(func() { _ = w.item.Close() }) // nobody has used it
}

// Attempts that fail are repeated after a while that doubles.
const (
	firstBackoff = 50 * time.Millisecond
	lastBackoff  = 10 * time.Second
)

// fill makes one item after the other, until there are enough.
func (s *Stock[T]) fill(ctx context.Context) {
	backoff := firstBackoff
	for {
		for s.wanting() && !s.held() {
			err := s.add(ctx)
			if ctx.Err() != nil {
				return
			}
			if err == nil {
				backoff = firstBackoff
				continue
			}
			s.mu.Lock()
			s.stats.Failed++
			s.stats.LastError = err.Error()
			s.tell()
			s.mu.Unlock()
			select {
			case <-time.After(backoff):
			case <-ctx.Done():
				return
			}
			backoff = min(2*backoff, lastBackoff)
		}
		select {
		case <-s.missed:
		case <-ctx.Done():
			return
		}
	}
}

// Hold keeps the stock from making items until release is called: whoever uses
// them then has the machine to himself. One that is being made is completed.
func (s *Stock[T]) Hold() (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.holds++
	return sync.OnceFunc(func() {
		s.mu.Lock()
		s.holds--
		s.mu.Unlock()
		s.Refill()
	})
}

// held reports whether no item may be made.
func (s *Stock[T]) held() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.holds > 0
}

// wanting reports whether items are missing or stale.
func (s *Stock[T]) wanting() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	fresh := 0
	for _, w := range s.waiting {
		if !w.stale {
			fresh++
		}
	}
	return fresh < s.count
}

// add makes an item, which takes the place of a stale one.
func (s *Stock[T]) add(ctx context.Context) error {
	item, err := s.cfg.Make(ctx)
	if err != nil {
		return err
	}
	w := &waiting[T]{item: item, taken: make(chan struct{})}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return item.Close()
	}
	defer s.mu.Unlock()
	s.waiting = append(s.waiting, w)
	s.tell()
	s.done.Go(func() { s.watch(w) })
	s.shrink() // it takes the place of a stale one, or fewer are to wait since it was begun
	return nil
}

// watch replaces an item that ends while it waits.
func (s *Stock[T]) watch(w *waiting[T]) {
	select {
	case <-w.taken:
		return
	case <-w.item.Done():
	}
	s.mu.Lock()
	mine := s.remove(w)
	if mine {
		s.lose(w.item.Wait())
		s.Refill()
	}
	s.mu.Unlock()
	if mine {
		// Without the lock: Close takes time, and locks of its own. It has ended; this
		// frees what is left of it.
		_ = w.item.Close()
	}
}
