package virtio

import "fmt"

// NetState is a Net at rest. It records what the guest was told; frames in the
// socket belong to the host's network stack.
type NetState struct {
	Config [netConfigLen]byte
	Stats  NetStats
}

// Save describes the device; it must be paused.
func (n *Net) Save() NetState {
	n.mu.Lock()
	defer n.mu.Unlock()
	return NetState{Config: n.config, Stats: n.stats}
}

// Restore prepares a fresh device, before MMIO.Restore. The guest read its
// address and its MTU once, so they must be the same.
func (n *Net) Restore(s NetState) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if s.Config != n.config {
		return fmt.Errorf("restore network device: guest knows configuration %x, device has %x", s.Config, n.config)
	}
	n.stats = s.Stats
	return nil
}
