package node

import (
	"context"

	"agentrun.dev/internal/sandbox"
)

// mayTake refuses the hash of a token that another sandbox has.
func (r roster) mayTake(token sandbox.TokenHash) error {
	if token == "" || r.tokens[token] == nil {
		return nil
	}
	return sandbox.Errorf(sandbox.CodeConflict, "the token is another sandbox's").Try("Make a new token for each sandbox")
}

// SandboxOfToken returns the living sandbox of a token. The context ends when the token is
// replaced.
func (m *Manager) SandboxOfToken(_ context.Context, t sandbox.Token) (sandbox.Sandbox, context.Context, error) {
	m.mu.Lock()
	b := m.roster.tokens[t.Hash]
	if t.Derived != "" {
		b = m.roster.byID[t.Derived]
	}
	var until context.Context
	if b != nil && b.token == t.Hash && (t.Derived == "" || t.Hash == "") {
		until = b.until
	}
	m.mu.Unlock()
	if until != nil {
		if s := b.now(); s.State != sandbox.Starting && s.State != sandbox.Ended {
			return s, until, nil
		}
	}
	return sandbox.Sandbox{}, nil, sandbox.Errorf(sandbox.CodeNotFound, "there is no sandbox that the token is for")
}

// SetToken replaces a sandbox's token. From then on the old token is refused, and its
// requests that are under way end.
func (m *Manager) SetToken(ctx context.Context, k sandbox.Key, token sandbox.TokenHash, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
	if token == "" {
		return sandbox.Sandbox{}, sandbox.Invalid("token", "its hash is missing")
	}
	return m.alter(ctx, k, when, func(_ context.Context, b *member) error {
		if b.now().Token == token {
			return nil
		}
		m.mu.Lock()
		err := m.roster.mayTake(token)
		if err == nil {
			m.roster.tokens[token] = b // reserves the token; it is not valid yet
		}
		m.mu.Unlock()
		if err != nil {
			return err
		}
		err = b.change(func(s *sandbox.Sandbox) { s.Token = token })
		m.mu.Lock()
		defer m.mu.Unlock()
		if err != nil {
			delete(m.roster.tokens, token)
			return err
		}
		delete(m.roster.tokens, b.token)
		b.revoke()
		b.hold(token)
		return nil
	})
}

// hold makes a token the sandbox's; empty means the derived one. The caller has the
// manager's mutex, or the only reference.
func (b *member) hold(token sandbox.TokenHash) {
	b.token = token
	b.until, b.revoke = context.WithCancel(context.Background())
}
