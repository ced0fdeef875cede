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

// lockToEnd waits for the sandbox's turn, to end it. Whoever has the turn may wait
// for a machine that never answers: so the machine is ended first.
func (b *member) lockToEnd(ctx context.Context) error {
	select {
	case <-b.turn:
		return nil
	default:
	}
	b.mu.Lock()
	sb := b.machine
	b.killed = sb != nil
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
