package node

import (
	"context"

	"agentrun.dev/internal/sandbox"
)

// Kill ends a sandbox, whatever is being done with it: a fork, a checkpoint or a
// hibernation that waits for its machine fails.
func (m *Manager) Kill(ctx context.Context, k sandbox.Key) (sandbox.Sandbox, error) {
	if err := m.begin(); err != nil {
		return sandbox.Sandbox{}, err
	}
	b, err := m.find(k)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := b.lockToEnd(ctx); err != nil {
		return sandbox.Sandbox{}, err
	}
	defer b.unlock()
	switch {
	case b.now().State != sandbox.Ended:
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
