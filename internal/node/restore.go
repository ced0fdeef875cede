package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

// Restore makes a sandbox that continues from a checkpoint, with an identity of
// its own. It returns when the sandbox has answered.
func (m *Manager) Restore(ctx context.Context, r sandbox.RestoreRequest) (s sandbox.Sandbox, replayed bool, err error) {
	s, replayed, err = doOnce(ctx, m, r.Once, sandboxIn, func(also record[sandbox.Sandbox]) (sandbox.Sandbox, error) { return m.restore(ctx, r, also) })
	if replayed {
		s, err = m.present(s)
	}
	return s, replayed, err
}

func (m *Manager) restore(ctx context.Context, r sandbox.RestoreRequest, also record[sandbox.Sandbox]) (sandbox.Sandbox, error) {
	k, spec := r.Key, r.Spec
	if err := m.beginMaking(); err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := spec.Validate(); err != nil {
		return sandbox.Sandbox{}, err
	}
	c, done, err := m.holdCheckpoint(sandbox.Key{Namespace: k.Namespace, Name: r.Checkpoint})
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	defer done()
	if err := m.mayCopy(ctx, c.Of, "restore"); err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := sandbox.CheckExpiry(spec.Expires, time.Now()); err != nil {
		return sandbox.Sandbox{}, err
	}
	if len(spec.Env) > 0 && len(c.Of.Given) > 0 {
		return sandbox.Sandbox{}, sandbox.Errorf(sandbox.CodeConflict, "checkpoint %s cannot be given variables", c.Name).
			Because("its environment would be written anew, and nobody keeps the values of secrets that came with the claim (%s)", strings.Join(c.Of.Given, ", ")).
			Try("Restore it without env")
	}
	if name := m.cfg.Engine.Name(); c.Of.Engine != name {
		return sandbox.Sandbox{}, sandbox.Errorf(sandbox.CodeConflict, "checkpoint %s cannot be restored here", c.Name).
			Because("it is of the engine %s, and this daemon has %s", c.Of.Engine, name).
			Try("Start the daemon with `--engine` as it was, or make a new checkpoint")
	}
	s := c.Of.Child(k.Name)
	s.Checkpoint, s.Metadata, s.Lifetime = c.Name, spec.Metadata, spec.Lifetime
	s.Env = merge(c.Of.Env, spec.Env)
	b, err := m.enlist(s)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	snap, held, err := m.openHeld(m.checkpointDir(c.ID), string(b.id))
	if err != nil {
		return sandbox.Sandbox{}, errors.Join(fmt.Errorf("restore checkpoint %s: %w", c.Name, err), b.forget())
	}
	defer func() { _ = snap.Close() }() // only read
	if err := m.reserve(s.Namespace, s.Memory, held...); err != nil {
		return sandbox.Sandbox{}, errors.Join(err, b.forget())
	}
	if err := b.restoreFrom(ctx, c, restoring{snap, held, spec.Env}, also); err != nil {
		m.capacity.release(s.Namespace, s.Memory, held...)
		return sandbox.Sandbox{}, errors.Join(err, b.forget())
	}
	return b.now(), nil
}

// restoring is the material for a restored sandbox: a checkpoint's snapshot, the
// memory that a machine of it holds, and the environment that it gets.
type restoring struct {
	snap *snapshot.Snapshot
	held []sandbox.Held
	env  sandbox.Env
}

// restoreFrom makes the machine of a sandbox whose name and memory are
// reserved.
func (b *member) restoreFrom(ctx context.Context, c sandbox.Checkpoint, from restoring, also record[sandbox.Sandbox]) error {
	m, s := b.manager, b.now()
	sb, machine, err := m.restoreMachine(ctx, s, c, from.snap)
	if err == nil {
		sb, err = m.connectMade(ctx, s, machine, sb, c.Of.Egress.Lineage)
	}
	if err != nil {
		return err
	}
	if len(from.env) > 0 { // its earlier environment is there already
		// The agent's environment is replaced as a whole, including secrets,
		// which only the store knows.
		var secrets sandbox.Env
		if secrets, err = m.secretEnv(s.Namespace, s.Secrets); err == nil {
			err = setEnv(ctx, sb, merge(s.Env, secrets))
		}
		if err != nil {
			err = fmt.Errorf("set the environment of sandbox %s: %w", s.Name, err)
		}
	}
	if err == nil {
		err = b.changeAnd(func(s *sandbox.Sandbox) {
			s.State, s.Machine, s.Boot, s.Layers = sandbox.Running, machine, m.cfg.Boot, from.held
			s.Egress.Lineage = nil
			s.Clock.Start(time.Now())
		}, also)
	}
	if err != nil {
		return errors.Join(err, sb.Close(), m.cfg.Engine.Remove(m.ctx, m.machineDir(machine)))
	}
	b.attach(sb)
	b.unlock()
	return nil
}

func (m *Manager) restoreMachine(ctx context.Context, s sandbox.Sandbox, c sandbox.Checkpoint, snap *snapshot.Snapshot) (engine.Sandbox, sandbox.ID, error) {
	sb, machine, err := m.startInTurn(ctx, s.Namespace, s.Limits, func(o engine.ForkOptions) (engine.Sandbox, error) {
		o.Hostname = string(s.Name)
		return m.cfg.Engine.Fork(ctx, snap, o)
	})
	switch {
	case errors.Is(err, engine.ErrMismatch):
		err = sandbox.Errorf(sandbox.CodeConflict, "checkpoint %s cannot be restored here", c.Name).Because("%w", err).
			Try("Restore it where it was made, or make a new one")
	case err != nil:
		err = fmt.Errorf("restore checkpoint %s: %w", c.Name, err)
	}
	return sb, machine, err
}

// holdCheckpoint finds a checkpoint and protects it from deletion until done is
// called.
func (m *Manager) holdCheckpoint(k sandbox.Key) (c sandbox.Checkpoint, done func(), err error) {
	m.mu.Lock()
	if m.restoring[k] < 0 {
		m.mu.Unlock()
		return c, nil, sandbox.NotFound(sandbox.KindCheckpoint, k)
	}
	m.restoring[k]++
	m.mu.Unlock()
	done = func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.restoring[k]--; m.restoring[k] == 0 {
			delete(m.restoring, k)
		}
	}
	err = m.db.View(func(tx *journal.Tx) error {
		c, err = readyCheckpoint(tx, k)
		return err
	})
	if err != nil {
		done()
		return c, nil, err
	}
	return c, done, nil
}
