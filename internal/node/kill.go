package node

import (
	"context"
	"slices"

	"agentrun.dev/internal/sandbox"
)

// Kill ends a sandbox that meets the preconditions, even during other operations: a fork, a
// checkpoint or a hibernation that waits for its machine fails. Only a kill with a resource
// version waits for the present operation, because that gives the sandbox another version.
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
	case !b.wasKilled(): // it ended by itself while we waited
		return sandbox.Sandbox{}, m.whyGone(k)
	}
	return b.now(), err
}

// untilKilled returns a context for the holder of the sandbox's turn. It ends when
// another call wants to end the sandbox. The holder calls done before it gives the turn
// back.
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

// lockToEnd waits for the sandbox's turn, to end it. The holder of the turn may wait
// for a machine that never answers, or that is still being made. So lockToEnd first
// ends the machine, and cancels the holder's operation.
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
		// Close may take as long as the turn's holder needs to notice. The call
		// that ends the sandbox closes the machine, too.
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
