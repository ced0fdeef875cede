package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

// with runs do during the sandbox's turn, if the sandbox meets the preconditions. Ending
// the sandbox also ends the context of do.
func (m *Manager) with(ctx context.Context, k sandbox.Key, when []sandbox.Precondition, do func(context.Context, *member) error) (sandbox.Sandbox, error) {
	if err := m.begin(); err != nil {
		return sandbox.Sandbox{}, err
	}
	b, err := m.findFor(k, when)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := b.lock(ctx); err != nil {
		return sandbox.Sandbox{}, err
	}
	defer b.unlock()
	now := b.now()
	if now.State == sandbox.Ended { // it has ended while we waited
		return sandbox.Sandbox{}, m.whyGone(k)
	}
	if err := now.Identity().Meets(when...); err != nil {
		return sandbox.Sandbox{}, err
	}
	ctx, done := b.untilKilled(ctx)
	defer done()
	err = do(ctx, b)
	return b.now(), err
}

// alter is with for operations that change the sandbox. If the sandbox has an owner,
// only some principals may do that.
func (m *Manager) alter(ctx context.Context, k sandbox.Key, when []sandbox.Precondition, do func(context.Context, *member) error) (sandbox.Sandbox, error) {
	return m.with(ctx, k, when, func(turn context.Context, b *member) error {
		if err := sandbox.MayChange(ctx, b.now().Identity()); err != nil {
			return err
		}
		return do(turn, b)
	})
}

// Pause stops a sandbox's processors; the sandbox keeps its memory. A paused or
// hibernated sandbox stays unchanged.
func (m *Manager) Pause(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
	return m.alter(ctx, k, when, func(ctx context.Context, b *member) error { return b.pause(ctx) })
}

func (b *member) pause(ctx context.Context) error {
	if b.now().State != sandbox.Running {
		return nil
	}
	if err := b.answers(); err != nil {
		return err
	}
	if err := b.machine.Pause(ctx); err != nil {
		return fmt.Errorf("pause sandbox %s: %w", b.id, err)
	}
	if err := b.change(func(s *sandbox.Sandbox) { s.State = sandbox.Paused; s.Clock.Stop(time.Now()) }); err != nil {
		return errors.Join(err, b.machine.Resume(context.WithoutCancel(ctx)))
	}
	return nil
}

// Resume resumes a paused or hibernated sandbox.
func (m *Manager) Resume(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
	return m.alter(ctx, k, when, func(ctx context.Context, b *member) error { return b.resume(ctx) })
}

func (b *member) resume(ctx context.Context) error {
	if err := b.answers(); err != nil {
		return err
	}
	switch b.now().State {
	case sandbox.Paused:
		if err := b.machine.Resume(ctx); err != nil {
			return fmt.Errorf("resume sandbox %s: %w", b.id, err)
		}
		if err := b.change(func(s *sandbox.Sandbox) { s.State = sandbox.Running; s.Clock.Start(time.Now()) }); err != nil {
			return errors.Join(err, b.machine.Pause(context.WithoutCancel(ctx)))
		}
	case sandbox.Hibernated:
		if err := b.manager.cordon.admit(true); err != nil {
			return err
		}
		return b.wake(ctx)
	}
	return nil
}

// Hibernate writes a sandbox to disk and frees its memory.
func (m *Manager) Hibernate(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
	return m.alter(ctx, k, when, func(ctx context.Context, b *member) error {
		return b.hibernate(ctx, func() bool { return true })
	})
}

// errNotDue says that a sandbox was used, or got more time, while it waited to hibernate.
var errNotDue = errors.New("its time is not up any more")

// hibernate waits for a turn, while the sandbox keeps running. Then it asks due whether
// the sandbox should still be hibernated.
func (b *member) hibernate(ctx context.Context, due func() bool) (err error) {
	last := b.now()
	if last.State == sandbox.Hibernated {
		return nil
	}
	if err := b.answers(); err != nil {
		return err
	}
	m := b.manager
	ctx, end := m.observer.Begin(ctx, last.Work(sandbox.OpHibernate))
	defer func() { end(sandbox.Outcome{Err: err}) }()
	if err := errors.Join(m.room.admit(), m.capacity.store(last.Namespace, 0)); err != nil {
		return fmt.Errorf("hibernate sandbox %s: %w", b.id, err)
	}
	release, err := m.captureTurns.take(ctx, last.Namespace)
	if err != nil {
		return fmt.Errorf("hibernate sandbox %s: %w", b.id, err)
	}
	defer release()
	if !due() {
		return errNotDue
	}
	asleep, kept := sandbox.NewID(), uint64(0)
	if err := b.change(func(s *sandbox.Sandbox) { s.State, s.Asleep = sandbox.Hibernating, asleep }); err != nil {
		return err
	}
	err = b.machine.Pause(ctx)
	if err == nil { // the sandbox cannot grow any more
		var stored func()
		if stored, err = m.admitCapture(ctx, b.machine); err == nil {
			defer stored()
		}
	}
	if err == nil {
		var snap *snapshot.Snapshot
		if snap, err = b.machine.Snapshot(ctx, m.asleepDir(asleep), m.sealing(last)...); err == nil {
			err = snap.Close()
		}
	}
	if err == nil {
		err = m.count(last.Namespace, m.asleepDir(asleep), &kept)
	}
	if err == nil {
		err = b.change(func(s *sandbox.Sandbox) {
			s.State, s.Machine, s.Boot = sandbox.Hibernated, "", ""
			s.Layers, s.Live, s.Kept = nil, nil, kept
			s.Egress.Lineage = captured(b.machine)
			s.Clock.Stop(time.Now())
		})
	}
	if err != nil {
		err = fmt.Errorf("hibernate sandbox %s: %w", b.id, err)
		m.capacity.discard(last.Namespace, kept)
		back := context.WithoutCancel(ctx)
		if last.State == sandbox.Running {
			err = errors.Join(err, b.machine.Resume(back))
		}
		// Removes the snapshot first: on a full disk that makes room for the
		// journal.
		return errors.Join(err, m.removeSnapshot(m.asleepDir(asleep)),
			b.revert(func(s *sandbox.Sandbox) { s.State, s.Asleep = last.State, "" }))
	}
	return b.dropMachine(last)
}

// wake makes a machine of the snapshot of a hibernated sandbox. The layers of
// the snapshot are in memory from then on.
func (b *member) wake(ctx context.Context) (err error) {
	m, last := b.manager, b.now()
	ctx, end := m.observer.Begin(ctx, last.Work(sandbox.OpWake))
	defer func() { end(sandbox.Outcome{Err: err}) }()
	snap, held, err := m.openHeld(m.asleepDir(last.Asleep), string(last.Asleep))
	if err != nil {
		return fmt.Errorf("wake sandbox %s: %w", b.id, err)
	}
	defer func() { err = errors.Join(err, snap.Close()) }()
	if err := m.reserve(last.Namespace, last.Memory, held...); err != nil {
		return err
	}
	sleepOn := func(s *sandbox.Sandbox) { s.State = sandbox.Hibernated }
	sb, machine, err := b.wakeMachine(ctx, last, snap)
	if err == nil {
		sb, err = m.connectMade(ctx, last, machine, sb, last.Egress.Lineage)
	}
	if err != nil {
		m.capacity.release(last.Namespace, last.Memory, held...)
		return errors.Join(fmt.Errorf("wake sandbox %s: %w", b.id, err), b.revert(sleepOn))
	}
	if err := b.change(func(s *sandbox.Sandbox) {
		s.State, s.Machine, s.Boot, s.Asleep = sandbox.Running, machine, m.cfg.Boot, ""
		s.Layers, s.Kept, s.Egress.Lineage = held, 0, nil
		s.Clock.Start(time.Now())
	}); err != nil {
		err = errors.Join(err, sb.Close(), m.cfg.Engine.Remove(m.ctx, m.machineDir(machine)))
		m.capacity.release(last.Namespace, last.Memory, held...)
		return errors.Join(err, b.revert(sleepOn))
	}
	b.attach(sb)
	err = m.removeSnapshot(m.asleepDir(last.Asleep))
	m.capacity.discard(last.Namespace, last.Kept)
	return err
}

func (b *member) wakeMachine(ctx context.Context, last sandbox.Sandbox, snap *snapshot.Snapshot) (engine.Sandbox, sandbox.ID, error) {
	m := b.manager
	if err := b.change(func(s *sandbox.Sandbox) { s.State = sandbox.Resuming }); err != nil {
		return nil, "", err
	}
	return m.startInTurn(ctx, last.Namespace, last.Limits, func(o engine.ForkOptions) (engine.Sandbox, error) {
		o.Hostname, o.KeepIdentity = string(last.Name), true
		return m.cfg.Engine.Fork(ctx, snap, o)
	})
}

// removeSnapshot deletes a snapshot's folder, if it exists.
func (m *Manager) removeSnapshot(dir string) error {
	defer m.removed()
	if err := snapshot.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Extend gives a sandbox a timeout that begins now; 0 removes the timeout.
func (m *Manager) Extend(ctx context.Context, k sandbox.Key, timeout time.Duration, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
	if timeout < 0 {
		return sandbox.Sandbox{}, sandbox.Errorf(sandbox.CodeInvalid, "the timeout %v is negative", timeout)
	}
	return m.alter(ctx, k, when, func(_ context.Context, b *member) error {
		return b.change(func(s *sandbox.Sandbox) {
			if s.Timeout = timeout; timeout > 0 {
				past := s.Clock.Elapsed(time.Now())
				s.Timeout = min(timeout, math.MaxInt64-past) + past
			}
		})
	})
}

// SetExpiry gives a sandbox another end time.
func (m *Manager) SetExpiry(ctx context.Context, k sandbox.Key, at time.Time, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
	if at.IsZero() {
		return sandbox.Sandbox{}, sandbox.Invalid("expires", "it is missing")
	}
	if err := sandbox.CheckExpiry(at, time.Now()); err != nil {
		return sandbox.Sandbox{}, err
	}
	return m.alter(ctx, k, when, func(_ context.Context, b *member) error {
		return b.change(func(s *sandbox.Sandbox) { s.Expires = at.UTC() })
	})
}
