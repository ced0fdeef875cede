package pool

import (
	"context"
	"fmt"
)

// Stats describes a pool.
type Stats struct {
	// Waiting is how many items wait now.
	Waiting int
	// Taken counts the waiting items that were handed out. MadeNow counts the
	// requests for which no item waited.
	Taken, MadeNow uint64
	// Lost counts items that ended while they waited, or could not be claimed.
	Lost uint64
	// Failed counts failures of Make. LastError is the reason of the last failure or
	// the last loss.
	Failed    uint64
	LastError string
}

// lose counts an item that was lost.
func (s *Stats) lose(why error) {
	s.Lost++
	s.LastError = why.Error()
}

// Stats describes the pool as it is now.
func (p *Pool[T, R]) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.current()
}

// current describes the pool. The caller holds p.mu.
func (p *Pool[T, R]) current() Stats {
	s := p.stats
	s.Waiting = len(p.waiting)
	return s
}

// record changes the counters.
func (p *Pool[T, R]) record(change func(*Stats)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change(&p.stats)
	p.notify()
}

// notify wakes the goroutines that wait for a change. The caller holds p.mu.
func (p *Pool[T, R]) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// WaitFull waits until all items wait and no item is stale.
func (p *Pool[T, R]) WaitFull(ctx context.Context) error {
	return p.WaitUntil(ctx, func(Stats) bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return !p.lacks()
	})
}

// WaitUntil waits until good returns true for the pool. It calls good without a lock.
func (p *Pool[T, R]) WaitUntil(ctx context.Context, good func(Stats) bool) error {
	for {
		p.mu.Lock()
		s, changed := p.current(), p.changed
		p.mu.Unlock()
		if good(s) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			if s.LastError != "" {
				return fmt.Errorf("wait for %s: %w (the last one failed: %s)", p.cfg.What, ctx.Err(), s.LastError)
			}
			return fmt.Errorf("wait for %s: %w", p.cfg.What, ctx.Err())
		}
	}
}
