package sandbox

import "agentrun.dev/internal/node/journal"

// SandboxByID returns a sandbox that has not ended. Looking at it does not wake
// it.
func (m *Manager) SandboxByID(id ID) (Sandbox, error) {
	m.mu.Lock()
	b := m.sandboxes[id]
	m.mu.Unlock()
	if b != nil {
		if s := b.now(); s.State != Starting && s.State != Ended {
			return s, nil
		}
	}
	return Sandbox{}, Errorf(CodeNotFound, "there is no sandbox with the id %s", quote(string(id)))
}

// Journal is where the manager keeps its objects. Others of the same daemon may
// keep theirs there, in collections of their own, until it closes.
func (m *Manager) Journal() *journal.DB { return m.db }
