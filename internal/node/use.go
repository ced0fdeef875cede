package node

import (
	"context"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
)

// use is one use of a running sandbox.
type use struct {
	member  *member
	machine engine.Sandbox
	record  sandbox.Sandbox
	closed  bool // protected by the member's mu
}

var _ sandbox.Session = (*use)(nil)

// Record implements sandbox.Session.
func (u *use) Record() sandbox.Sandbox { return u.record }

// Agent implements sandbox.Session.
func (u *use) Agent() *guestrpc.Client { return u.machine.Agent() }

// Stats implements sandbox.Session.
func (u *use) Stats(ctx context.Context) (sandbox.Stats, error) {
	s, err := u.machine.Stats(ctx)
	return fromStats(s), err
}

// Use begins to use a sandbox. It resumes a paused or hibernated one;
// concurrent calls wake the sandbox once.
func (m *Manager) Use(ctx context.Context, k sandbox.Key) (sandbox.Session, error) {
	if err := m.begin(); err != nil {
		return nil, err
	}
	b, err := m.find(k)
	if err != nil {
		return nil, err
	}
	if u := b.use(); u != nil {
		return u, nil
	}
	var u *use
	_, err = m.with(ctx, k, nil, func(ctx context.Context, b *member) error {
		if err := b.resume(ctx); err != nil {
			return err
		}
		u = b.use()
		return nil
	})
	if err != nil {
		return nil, err
	}
	if u == nil {
		return nil, m.whyGone(k)
	}
	return u, nil
}

// use counts a user of a running sandbox.
func (b *member) use() *use {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.record.State != sandbox.Running || b.machine == nil {
		return nil
	}
	b.users++
	if b.users == 1 {
		b.arm()
	}
	return &use{member: b, machine: b.machine, record: *b.record}
}

// Close implements sandbox.Session. Only the first call has an effect.
func (u *use) Close() {
	b := u.member
	b.mu.Lock()
	defer b.mu.Unlock()
	if u.closed {
		return
	}
	u.closed = true
	b.users--
	if b.users == 0 {
		b.arm()
	}
}
