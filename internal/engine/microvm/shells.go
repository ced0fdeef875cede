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

// A shell is a jailed vmm process with a VM, its processors and the memory of a
// snapshot, the pages that a fork writes to first included, and waits for a
// state and devices. It serves any fork of the snapshot, whatever its limits,
// and ends with the process that made it.

var _ engine.Ahead = (*Engine)(nil)

// KeepShells has shells wait for forks of a snapshot.
func (e *Engine) KeepShells(snap *snapshot.Snapshot, count int) (engine.Shells, error) {
	if err := e.Fits(snap.Manifest()); err != nil {
		return nil, fmt.Errorf("keep shells of %s: %w", snap.ID(), err)
	}
	s := &shells{set: &e.shells, id: snap.ID()}
	s.pool = pool.New(pool.Config[shell, struct{}]{
		What: "VM shells", Count: count,
		Make: func(ctx context.Context) (shell, error) { return e.newShell(ctx, snap) },
	})
	if !e.shells.add(s) {
		return nil, errors.Join(errors.New("keep shells: the engine is closed"), s.pool.Close())
	}
	return s, nil
}

// newShell makes one.
func (e *Engine) newShell(ctx context.Context, snap *snapshot.Snapshot) (shell, error) {
	s, err := e.describe(snap, "shell")
	if err != nil {
		return shell{}, err
	}
	limits, err := e.limits(s, engine.Limits{})
	if err != nil {
		return shell{}, err
	}
	from := e.originOf(snap)
	from.touch = e.touched.known(snap.ID())
	first, err := e.prepareShell(ctx, s, from)
	if err != nil {
		return shell{}, err
	}
	defer first.Close()
	p, err := process.Begin(e.vmm, limits, first)
	if err != nil {
		return shell{}, err
	}
	return shell{p}, nil
}

// shell is a process that waits.
type shell struct{ *process.Process }

func (s shell) Wait() error {
	<-s.Done()
	return s.Ended()
}

func (s shell) Close() error {
	s.Kill()
	return nil
}

// shells are those of one call of KeepShells.
type shells struct {
	set  *shellSet
	id   snapshot.ID
	pool *pool.Pool[shell, struct{}] // a fork takes shells until one serves it
}

func (s *shells) WaitFull(ctx context.Context) error { return s.pool.WaitFull(ctx) }

func (s *shells) Stats() engine.ShellStats {
	st := s.pool.Stats()
	return engine.ShellStats{Waiting: st.Waiting, Taken: st.Taken, Lost: st.Lost, Failed: st.Failed, LastError: st.LastError}
}

func (s *shells) Close() error {
	s.set.remove(s)
	return s.pool.Close()
}

// shellSet is all shells of an engine.
type shellSet struct {
	mu     sync.Mutex // protects all following fields
	all    []*shells
	closed bool
}

func (set *shellSet) add(s *shells) bool {
	set.mu.Lock()
	defer set.mu.Unlock()
	if !set.closed {
		set.all = append(set.all, s)
	}
	return !set.closed
}

func (set *shellSet) remove(s *shells) {
	set.mu.Lock()
	defer set.mu.Unlock()
	set.all = slices.DeleteFunc(set.all, func(other *shells) bool { return other == s })
}

func (set *shellSet) close() error {
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

// each calls do for the shells of a snapshot until it returns true.
func (set *shellSet) each(id snapshot.ID, do func(*shells) bool) {
	set.mu.Lock()
	all := slices.Clone(set.all)
	set.mu.Unlock()
	for _, s := range all {
		if s.id == id && do(s) {
			return
		}
	}
}

// take takes one that waits.
func (set *shellSet) take(id snapshot.ID) (p *process.Process, ok bool) {
	set.each(id, func(s *shells) bool {
		var taken shell
		if taken, ok = s.pool.Take(); ok {
			p = taken.Process
		}
		return ok
	})
	return p, ok
}

// refill makes those that were taken again.
func (set *shellSet) refill(id snapshot.ID) {
	set.each(id, func(s *shells) bool { s.pool.Refill(); return false })
}

// renew replaces those that wait: more is known of what they should have.
func (set *shellSet) renew(id snapshot.ID) {
	set.each(id, func(s *shells) bool { s.pool.Renew(); return false })
}
