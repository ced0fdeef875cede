package node

import (
	"context"
	"errors"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/sandbox"
)

// forkClaimed makes a machine for a claim.
func (m *Manager) forkClaimed(ctx context.Context, s *stock, hostname string) (_ *parked, err error) {
	// A claim without enough memory fails at once.
	namespace, memory := s.build.Template.Namespace, m.machineMemory(s.spec)
	if err := m.reserve(namespace, memory, s.held...); err != nil {
		return nil, err
	}
	release, err := m.turns.take(ctx, namespace)
	if err != nil {
		m.capacity.release(namespace, memory, s.held...)
		return nil, err
	}
	defer release()
	ctx, end := m.observer.Begin(ctx, sandbox.Work{Op: sandbox.OpFork, Pool: s.pool})
	defer func() { end(sandbox.Outcome{Err: err}) }()
	p, err := m.startParked(s, memory, func(o engine.ForkOptions) (engine.Sandbox, error) {
		o.Hostname = hostname
		return m.cfg.Engine.Fork(ctx, s.snap, o)
	})
	if err != nil {
		return nil, err
	}
	release() // the ready check and the warm-up of a template may take any time
	if err := m.finish(ctx, s, p.Sandbox); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// forkWaiting forks a machine that will wait in a pool until it is claimed. The fork
// has a turn of its own, and so has each rehearsal after it.
func (m *Manager) forkWaiting(ctx context.Context, s *stock) (_ *parked, err error) {
	if err := m.cordon.wait(ctx); err != nil {
		return nil, err
	}
	release, err := m.turns.takeIdle(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { release() }()
	ctx, end := m.observer.Begin(ctx, sandbox.Work{Op: sandbox.OpFork, Pool: s.pool})
	defer func() { end(sandbox.Outcome{Err: err}) }()
	// This comes with its turn, because a claim may need the memory until then.
	memory := m.machineMemory(s.spec)
	if err := m.reserve(s.build.Template.Namespace, memory, s.held...); err != nil {
		return nil, err
	}
	p, err := m.startParked(s, memory, func(o engine.ForkOptions) (engine.Sandbox, error) {
		return engine.ForkRehearsed(ctx, m.cfg.Engine, s.snap, o, func(ctx context.Context, sb engine.Sandbox) error {
			if s.build.Stage == sandbox.AfterInit { // finish may take long, as for a claim
				release()
				if err := m.finish(ctx, s, sb); err != nil {
					return err
				}
				again, err := m.turns.takeIdle(ctx)
				if err != nil {
					return err
				}
				release = again
			}
			return m.cfg.Builder.Rehearse(ctx, s.spec, sb)
		})
	})
	if err != nil {
		return nil, err
	}
	p.waited = true
	return p, nil
}

// startParked makes a machine of a build. The caller has a turn, and has reserved
// the machine's memory, which is released after an error.
func (m *Manager) startParked(s *stock, memory uint64, start func(engine.ForkOptions) (engine.Sandbox, error)) (*parked, error) {
	namespace := s.build.Template.Namespace
	sb, id, err := m.startMachine(limitsOf(s.spec), start)
	if err != nil {
		m.capacity.release(namespace, memory, s.held...)
		return nil, err
	}
	m.park(id, s.pool)
	return &parked{Sandbox: sb, manager: m, id: id, namespace: namespace, memory: memory, held: s.held}, nil
}
