package microvm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/engine/pool"
	"agentrun.dev/internal/storage/snapshot"
)

// A spare is a jailed vmm process with a VM, its processors and the memory of a
// snapshot, including the pages that a fork writes to first. It waits for a state and
// devices. It serves any fork of the snapshot, whatever the fork's limits, and ends
// with the process that made it.

var _ engine.Ahead = (*Engine)(nil)

// KeepSpares keeps spares waiting for forks of a snapshot.
func (e *Engine) KeepSpares(snap *snapshot.Snapshot, count int) (engine.Spares, error) {
	if err := e.Fits(snap.Manifest()); err != nil {
		return nil, fmt.Errorf("keep spares of %s: %w", snap.ID(), err)
	}
	s := &spares{set: &e.spares, id: snap.ID()}
	s.pool = pool.New(pool.Config[spare, struct{}]{
		What: "spares", Count: count,
		Make: func(ctx context.Context) (spare, error) { return e.newSpare(ctx, snap) },
	})
	if !e.spares.add(s) {
		return nil, errors.Join(errors.New("keep spares: the engine is closed"), s.pool.Close())
	}
	return s, nil
}

// newSpare makes a spare.
func (e *Engine) newSpare(ctx context.Context, snap *snapshot.Snapshot) (spare, error) {
	s, err := e.describe(snap, "spare")
	if err != nil {
		return spare{}, err
	}
	limits, err := e.limits(s, engine.Limits{})
	if err != nil {
		return spare{}, err
	}
	from := e.originOf(snap)
	from.touch = e.touched.known(snap.ID())
	first, err := e.prepareSpare(ctx, s, from)
	if err != nil {
		return spare{}, err
	}
	defer first.Close()
	p, err := process.Begin(e.vmm, limits, first)
	if err != nil {
		return spare{}, err
	}
	return spare{p}, nil
}

// spare is a waiting process.
type spare struct{ *process.Process }

func (s spare) Wait() error {
	<-s.Done()
	return s.Ended()
}

func (s spare) Close() error {
	s.Kill()
	return nil
}

// spares are the spares of one call of KeepSpares.
type spares struct {
	set  *spareSet
	id   snapshot.ID
	pool *pool.Pool[spare, struct{}] // a fork takes spares until one serves it
}

func (s *spares) WaitFull(ctx context.Context) error { return s.pool.WaitFull(ctx) }

func (s *spares) Stats() engine.SpareStats {
	st := s.pool.Stats()
	return engine.SpareStats{Waiting: st.Waiting, Taken: st.Taken, Lost: st.Lost, Failed: st.Failed, LastError: st.LastError}
}

func (s *spares) Close() error {
	s.set.remove(s)
	return s.pool.Close()
}

// spareSet is all spares of an engine.
type spareSet struct {
	mu     sync.Mutex // protects all following fields
	all    []*spares
	closed bool
}

func (set *spareSet) add(s *spares) bool {
	set.mu.Lock()
	defer set.mu.Unlock()
	if !set.closed {
		set.all = append(set.all, s)
	}
	return !set.closed
}

func (set *spareSet) remove(s *spares) {
	set.mu.Lock()
	defer set.mu.Unlock()
	set.all = slices.DeleteFunc(set.all, func(other *spares) bool { return other == s })
}

func (set *spareSet) close() error {
	set.mu.Lock()
	all := set.all
	set.all, set.closed = nil, true
	set.mu.Unlock()
	var errs []error
	for _, s := range all {
		errs = append(errs, s.pool.Close())
	}
	return errors.Join(errs...)
}

// each calls do for the spares of a snapshot until it returns true.
func (set *spareSet) each(id snapshot.ID, do func(*spares) bool) {
	set.mu.Lock()
	all := slices.Clone(set.all)
	set.mu.Unlock()
	for _, s := range all {
		if s.id == id && do(s) {
			return
		}
	}
}

// take takes a waiting spare.
func (set *spareSet) take(id snapshot.ID) (p *process.Process, ok bool) {
	set.each(id, func(s *spares) bool {
		var taken spare
		if taken, ok = s.pool.Take(); ok {
			p = taken.Process
		}
		return ok
	})
	return p, ok
}

// refill replaces the spares that were taken.
func (set *spareSet) refill(id snapshot.ID) {
	set.each(id, func(s *spares) bool { s.pool.Refill(); return false })
}

// renew replaces the waiting spares, once more is known about the pages that they
// should contain.
func (set *spareSet) renew(id snapshot.ID) {
	set.each(id, func(s *spares) bool { s.pool.Renew(); return false })
}
