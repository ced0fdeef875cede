package node

import (
	"context"
	"slices"

	"agentrun.dev/internal/sandbox"
)

// Kill ends a sandbox, if it meets preconditions, whatever is being done with it: a fork, a
// checkpoint or a hibernation that waits for its machine fails. Only a kill of a resource
// version waits for what is being done, since that makes it another one.
func (m *Manager) Kill(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
	if err := m.begin(); err != nil {
		return sandbox.Sandbox{}, err
	}
	b, err := m.findFor(k, when)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := sandbox.MayChange(ctx, b.now().Identity()); err != nil {
		return sandbox.Sandbox{}, err
	}
	lock := b.lockToEnd
	if slices.ContainsFunc(when, func(p sandbox.Precondition) bool { return p.Version != 0 }) {
		lock = b.lock
	}
	if err := lock(ctx); err != nil {
		return sandbox.Sandbox{}, err
	}
	defer b.unlock()
	switch now := b.now(); {
	case now.State != sandbox.Ended:
		if err := now.Identity().Meets(when...); err != nil {
			return sandbox.Sandbox{}, err
		}
		err = b.ended(sandbox.ReasonKilled, "")
	case !b.wasKilled(): // it has ended by itself while we waited
		return sandbox.Sandbox{}, m.whyGone(k)
	}
	return b.now(), err
}

// untilKilled is a context for whoever has the sandbox's turn, which ends when somebody
// wants to end the sandbox. done is called before the turn is given back.
func (b *member) untilKilled(ctx context.Context) (_ context.Context, done func()) {
	ctx, cancel := context.WithCancel(ctx)
	b.mu.Lock()
	b.cancel = cancel
	b.mu.Unlock()
	return ctx, func() {
		b.mu.Lock()
		b.cancel = nil
		b.mu.Unlock()
		cancel()
	}
}

// lockToEnd waits for the sandbox's turn, to end it. Whoever has the turn may wait
// for a machine that never answers, or for one that is being made: so the machine is
// ended first, and what is done with the sandbox is cancelled.
func (b *member) lockToEnd(ctx context.Context) error {
	select {
	case <-b.turn:
		return nil
	default:
	}
	b.mu.Lock()
	sb := b.machine
	b.killed = sb != nil
	if b.cancel != nil {
		b.cancel()
	}
	b.mu.Unlock()
	if sb != nil {
		// It may take as long as whoever has the turn takes to notice. Whoever ends
		// the sandbox closes the machine, too.
		b.manager.work.Go(func() {
			if err := sb.Close(); err != nil {
				b.manager.cfg.Log.Error("end the machine of a sandbox that is killed", "sandbox", b.id, "error", err)
			}
		})
	}
	return b.lock(ctx)
}

// wasKilled reports whether the machine was ended by lockToEnd.
func (b *member) wasKilled() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.killed
}
