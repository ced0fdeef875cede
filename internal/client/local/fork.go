package local

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/storage/snapshot"
)

// Forked is the result of Fork.
type Forked struct {
	// Errs has the result of each fork.
	Errs []error
	// Live is the cost to a running source; nil for forks of a snapshot.
	Live *engine.LiveForkStats
}

// Fork makes sandboxes that continue from a snapshot, or from one instant of a
// running sandbox. Each fork succeeds or fails separately.
func (s *Store) Fork(ctx context.Context, from Name, names []Name, limits engine.Limits) (*Forked, error) {
	out := &Forked{Errs: make([]error, len(names))}
	var opts []engine.ForkOptions
	var which []int // of names, for each of opts
	for i, n := range names {
		if out.Errs[i] = s.make(n); out.Errs[i] == nil {
			opts = append(opts, engine.ForkOptions{Hostname: string(n), Folder: s.machineDir(n, 0), Limits: limits})
			which = append(which, i)
		}
	}
	live, r, err := s.forkFrom(ctx, from, opts)
	if err != nil {
		for _, i := range which {
			err = errors.Join(err, os.RemoveAll(s.sandboxDir(names[i])))
		}
		return nil, fmt.Errorf("fork %s: %w", from, err)
	}
	if r.Snapshot == "" {
		out.Live = &live.Stats
	}
	r.Limits, r.Created = limits, time.Now().UTC().Truncate(time.Second)
	for k, i := range which {
		err := live.Errs[k]
		if err == nil {
			err = s.leave(live.Forks[k], names[i], r)
		}
		if err != nil {
			out.Errs[i] = errors.Join(err, os.RemoveAll(s.sandboxDir(names[i])))
		}
	}
	return out, nil
}

// forkFrom forks a snapshot or a running sandbox. The record names the engine and
// the snapshot.
func (s *Store) forkFrom(ctx context.Context, from Name, opts []engine.ForkOptions) (out *engine.LiveFork, r record, err error) {
	if dir := s.snapshotDir(from); exists(dir) {
		snap, err := snapshot.Open(dir)
		if err != nil {
			return nil, r, err
		}
		defer func() { err = errors.Join(err, snap.Close()) }()
		if r.Engine, err = pick.Of(snap.Manifest().Engine); err != nil {
			return nil, r, err
		}
		e, err := s.engine(r.Engine)
		if err != nil {
			return nil, r, err
		}
		out = &engine.LiveFork{}
		for _, o := range opts {
			sb, err := e.Fork(ctx, snap, o)
			out.Forks, out.Errs = append(out.Forks, sb), append(out.Errs, err)
		}
		r.Snapshot = snap.ID().String()
		return out, r, nil
	}
	if !exists(s.sandboxDir(from)) {
		return nil, r, ErrNotFound
	}
	old, err := s.record(from)
	if err != nil {
		return nil, r, err
	}
	source, err := s.Attach(ctx, from)
	if err != nil {
		return nil, r, err
	}
	defer func() { err = errors.Join(err, source.Detach()) }()
	out, err = source.Fork(ctx, opts)
	return out, record{Engine: old.Engine}, err
}

// make makes the folder of a new sandbox. Until its record is written, the
// sandbox counts as half made.
func (s *Store) make(name Name) error {
	if err := s.free(name); err != nil {
		return err
	}
	if err := os.Mkdir(s.sandboxDir(name), 0o700); err != nil { // another fork may have taken the name meanwhile
		return fmt.Errorf("fork: %w", err)
	}
	if err := os.Mkdir(s.machineDir(name, 0), 0o700); err != nil {
		return errors.Join(fmt.Errorf("fork: %w", err), os.RemoveAll(s.sandboxDir(name)))
	}
	return nil
}
