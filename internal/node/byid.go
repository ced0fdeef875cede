package node

import (
	"context"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// SandboxByID returns a sandbox that has not ended, without waking it.
func (m *Manager) SandboxByID(_ context.Context, id sandbox.ID) (sandbox.Sandbox, error) {
	m.mu.Lock()
	b := m.roster.byID[id]
	m.mu.Unlock()
	if b != nil {
		if s := b.now(); s.State != sandbox.Starting && s.State != sandbox.Ended {
			return s, nil
		}
	}
	return sandbox.Sandbox{}, sandbox.Errorf(sandbox.CodeNotFound, "there is no sandbox with the id %s", sandbox.Quote(string(id)))
}

// present returns the current state of a sandbox from an earlier answer. If its record
// is forgotten, the sandbox has ended.
func (m *Manager) present(s sandbox.Sandbox) (sandbox.Sandbox, error) {
	m.mu.Lock()
	b := m.roster.byID[s.ID]
	m.mu.Unlock()
	if b != nil {
		return b.now(), nil
	}
	err := m.db.View(func(tx *journal.Tx) error {
		last, found, err := ended.Get(tx, endedKey(s))
		if found {
			s = last
		}
		s.State = sandbox.Ended
		return err
	})
	return s, err
}

// Journal is the journal of the manager's objects. Other parts of the daemon
// may keep theirs there, in collections of their own, until it closes.
func (m *Manager) Journal() *journal.DB { return m.db }
