package sandbox

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
