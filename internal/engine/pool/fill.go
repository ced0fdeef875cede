package pool

import (
	"context"
	"sync"
	"time"
)

// Refill makes missing items in the background.
func (p *Pool[T, R]) Refill() {
	select {
	case p.look <- struct{}{}:
	default:
	}
}

// Renew replaces the items that wait now, one after the other. Each item can be got
// until its replacement is ready.
func (p *Pool[T, R]) Renew() {
	p.mu.Lock()
	for _, e := range p.waiting {
		e.stale = true
	}
	p.mu.Unlock()
	p.Refill()
}

// Resize changes how many items wait. Surplus items are closed: first the stale
// items, then the youngest, which have settled the least.
func (p *Pool[T, R]) Resize(count int) {
	p.mu.Lock()
	p.count = count
	p.shrink()
	p.mu.Unlock()
	p.Refill()
}

// Hold keeps the pool from making items until release is called, so that the users of
// its items have the machine to themselves. An item that is being made is completed.
func (p *Pool[T, R]) Hold() (release func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.holds++
	return sync.OnceFunc(func() {
		p.mu.Lock()
		p.holds--
		p.mu.Unlock()
		p.Refill()
	})
}

// A failed attempt is repeated after a while. The while doubles with each failure,
// from firstBackoff up to lastBackoff.
const (
	firstBackoff = 50 * time.Millisecond
	lastBackoff  = 10 * time.Second
)

// fill makes items one after the other, until enough wait.
func (p *Pool[T, R]) fill(ctx context.Context) {
	backoff := firstBackoff
	for {
		for p.mayMake() {
			err := p.add(ctx)
			if ctx.Err() != nil {
				return
			}
			if err == nil {
				backoff = firstBackoff
				continue
			}
			p.record(func(s *Stats) {
				s.Failed++
				s.LastError = err.Error()
			})
			select {
			case <-time.After(backoff):
			case <-ctx.Done():
				return
			}
			backoff = min(2*backoff, lastBackoff)
		}
		select {
		case <-p.look:
		case <-ctx.Done():
			return
		}
	}
}

// mayMake reports whether an item is to be made.
func (p *Pool[T, R]) mayMake() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.holds == 0 && p.lacks()
}

// lacks reports whether items are missing or stale. The caller holds p.mu.
func (p *Pool[T, R]) lacks() bool {
	fresh := 0
	for _, e := range p.waiting {
		if !e.stale {
			fresh++
		}
	}
	return fresh < p.count
}

// add makes an item and lets it wait.
func (p *Pool[T, R]) add(ctx context.Context) error {
	item, err := p.cfg.Make(ctx)
	if err != nil {
		return err
	}
	e := &entry[T]{item: item, left: make(chan struct{})}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return item.Close()
	}
	defer p.mu.Unlock()
	p.waiting = append(p.waiting, e)
	p.notify()
	p.work.Go(func() { p.watch(e) })
	p.shrink() // the item replaces a stale one, or Resize has lowered the count meanwhile
	return nil
}

// watch replaces an item that ends while it waits.
func (p *Pool[T, R]) watch(e *entry[T]) {
	select {
	case <-e.left:
		return
	case <-e.item.Done():
	}
	why := e.item.Wait()
	p.mu.Lock()
	mine := p.remove(e)
	if mine {
		p.stats.lose(why)
	}
	p.mu.Unlock()
	if mine {
		p.Refill()
		// Close is called without the lock, since it takes time and has locks of its
		// own. The item has ended, and Close frees its remains.
		_ = e.item.Close()
	}
}

// shrink closes surplus items. The caller holds p.mu.
func (p *Pool[T, R]) shrink() {
	for len(p.waiting) > p.count {
		last := p.waiting[len(p.waiting)-1]
		for _, e := range p.waiting {
			if e.stale {
				last = e
				break
			}
		}
		p.remove(last)
		close(last.left)
		p.work.Go(func() { _ = last.item.Close() }) // the item was never used
	}
}
