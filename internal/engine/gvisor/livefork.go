package gvisor

import (
	"context"
	"fmt"
	"sync"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/identity"
)

// Fork forks a running sandbox. Its checkpoint is written to memory, and all forks
// are restored from it at once. The sandbox stands still while the checkpoint is
// written.
func (s *sandbox) Fork(ctx context.Context, opts []engine.ForkOptions) (*engine.LiveFork, error) {
	s.capture.Lock()
	defer s.capture.Unlock()
	// This is checked before the sandbox is stopped: only its own build can restore
	// the checkpoint.
	if err := s.engine.helpers.check(s.build); err != nil {
		return nil, fmt.Errorf("fork: %w", err)
	}
	begin := time.Now()
	c, pause, err := s.take(ctx)
	if err != nil {
		return nil, fmt.Errorf("fork: %w", err)
	}
	defer c.close() // the forks have their own copies
	f := &engine.LiveFork{Forks: make([]engine.Sandbox, len(opts)), Errs: make([]error, len(opts))}
	f.Stats = engine.LiveForkStats{
		Pause: pause, Captured: time.Since(begin), Copied: c.size(),
		WhyCopiedInPause: "gVisor writes a checkpoint while its sandbox stands still",
	}
	// The forks read the checkpoint while they run, and do not report when they have
	// finished. The source keeps the memory that it was itself restored from, which
	// may be an earlier capture.
	f.Same = true
	f.Held = []engine.Held{{ID: "live-" + identity.Hex(16), Bytes: c.size()}}
	s.mu.Lock()
	s.lastFork = f.Stats
	s.mu.Unlock()
	var all sync.WaitGroup
	for i, o := range opts {
		all.Go(func() {
			child, err := s.child(ctx, c, o)
			if err != nil {
				f.Errs[i] = fmt.Errorf("fork: %w", err)
				return
			}
			f.Forks[i] = child
		})
	}
	all.Wait()
	return f, nil
}

// child starts a sandbox that continues from a checkpoint of this one.
func (s *sandbox) child(ctx context.Context, c checkpoint, opts engine.ForkOptions) (*sandbox, error) {
	release, err := opts.WaitTurn(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	child := &sandbox{
		engine: s.engine, self: identity.Self{Hostname: opts.Hostname}, vcpus: s.vcpus, memory: s.memory, disk: s.disk,
		root: s.root.use(), parent: s.parent, network: s.network, build: s.build,
	}
	if child.self.Hostname == "" {
		child.self.Hostname = identity.Hostname()
	}
	child.self.Generation.Store(s.self.Generation.Load() + 1)
	if err := child.restore(ctx, c, opts, nil); err != nil {
		return nil, err
	}
	return child, nil
}
