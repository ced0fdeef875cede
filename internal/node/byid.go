package node

import (
	"context"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// SandboxByID returns a sandbox that has not ended. Looking at it does not wake
// it.
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

// present is a sandbox as it is now, of which a request was answered before. One whose
// record is forgotten has ended.
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

// Journal is where the manager keeps its objects. Others of the same daemon may
// keep theirs there, in collections of their own, until it closes.
func (m *Manager) Journal() *journal.DB { return m.db }
