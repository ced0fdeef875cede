package local

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/snapshot"
)

// Forked is what Fork gave.
type Forked struct {
	// Errs has the outcome of each fork.
	Errs []error
	// Live is what it cost a running source; nil if a snapshot was forked.
	Live *engine.LiveForkStats
}

// Fork makes sandboxes that continue from a snapshot, or from one instant of a
// running sandbox. Each has its own outcome.
func (s *Store) Fork(ctx context.Context, from Name, names []Name, limits engine.Limits) (*Forked, error) {
	switch {
	case exists(s.snapshotDir(from)):
		return s.forkSnapshot(ctx, from, names, limits)
	case exists(s.sandboxDir(from)):
		return s.forkSandbox(ctx, from, names, limits)
	}
	return nil, fmt.Errorf("fork %s: %w", from, ErrNotFound)
}

func (s *Store) forkSnapshot(ctx context.Context, from Name, names []Name, limits engine.Limits) (_ *Forked, err error) {
	snap, err := snapshot.Open(s.snapshotDir(from))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, snap.Close()) }()
	out := &Forked{}
	for _, n := range names {
		out.Errs = append(out.Errs, s.fork(ctx, snap, n, limits))
	}
	return out, nil
}

func (s *Store) fork(ctx context.Context, snap *snapshot.Snapshot, name Name, limits engine.Limits) (err error) {
	dir, err := s.prepare(snap, name)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	sb, err := s.engine.Fork(ctx, snap, s.options(name, limits))
	if err != nil {
		return err
	}
	return s.settle(sb, name, newRecord(snap, limits))
}

// prepare makes the folder of a sandbox that is about to be forked. Without a
// record it is half made.
func (s *Store) prepare(base *snapshot.Snapshot, name Name) (dir string, err error) {
	if err := s.free(name); err != nil {
		return "", err
	}
	dir = s.sandboxDir(name)
	if err := os.Mkdir(dir, 0o700); err != nil { // another fork may have been faster
		return "", fmt.Errorf("fork: %w", err)
	}
	if err := clone(base, filepath.Join(dir, fromName)); err != nil {
		return "", errors.Join(err, os.RemoveAll(dir))
	}
	return dir, nil
}

func (s *Store) options(name Name, limits engine.Limits) engine.ForkOptions {
	return engine.ForkOptions{
		Hostname: string(name), Socket: filepath.Join(s.sandboxDir(name), controlName), Limits: limits,
	}
}

func newRecord(base *snapshot.Snapshot, limits engine.Limits) record {
	return record{
		From: fromName, Limits: limits, Created: time.Now().UTC().Truncate(time.Second), Snapshot: base.ID().String(),
	}
}

// settle leaves a new sandbox to itself, or ends it.
func (s *Store) settle(sb engine.Sandbox, name Name, r record) error {
	if err := s.leave(sb, name, r); err != nil {
		return errors.Join(err, sb.Close())
	}
	return nil
}

// forkSandbox forks a running sandbox. Nothing is written but what its forks are
// made of: they hold their layers themselves, and what they are based on is
// linked, as their source has it.
func (s *Store) forkSandbox(ctx context.Context, from Name, names []Name, limits engine.Limits) (_ *Forked, err error) {
	sb, err := s.Attach(ctx, from)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, sb.Detach()) }()
	r, err := s.record(from)
	if err != nil {
		return nil, err
	}
	base, err := snapshot.Open(filepath.Join(s.sandboxDir(from), r.From))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, base.Close()) }()
	out := &Forked{Errs: make([]error, len(names))}
	var opts []engine.ForkOptions
	var which []int // of names, for each of opts
	for i, n := range names {
		if _, out.Errs[i] = s.prepare(base, n); out.Errs[i] == nil {
			opts, which = append(opts, s.options(n, limits)), append(which, i)
		}
	}
	live, err := sb.Fork(ctx, opts)
	if err != nil {
		for _, i := range which {
			err = errors.Join(err, os.RemoveAll(s.sandboxDir(names[i])))
		}
		return nil, fmt.Errorf("fork %s: %w", from, err)
	}
	out.Live = &live.Stats
	for k, i := range which {
		err := live.Errs[k]
		if err == nil {
			err = s.settleLive(live.Forks[k], names[i], newRecord(base, limits))
		}
		if err != nil {
			out.Errs[i] = errors.Join(err, os.RemoveAll(s.sandboxDir(names[i])))
		}
	}
	return out, nil
}

func (s *Store) settleLive(sb engine.Sandbox, name Name, r record) (err error) {
	if r.Live, err = microvm.DescribeLive(sb); err != nil {
		return errors.Join(err, sb.Close())
	}
	return s.settle(sb, name, r)
}
