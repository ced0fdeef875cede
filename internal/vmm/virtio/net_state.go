package virtio

import "fmt"

// NetState is the state of a paused Net. It records the configuration that the
// guest knows; frames in the socket belong to the host's network stack.
type NetState struct {
	Config [netConfigLen]byte
	Stats  NetStats
}

// Save returns the state of the device, which must be paused.
func (n *Net) Save() NetState {
	n.mu.Lock()
	defer n.mu.Unlock()
	return NetState{Config: n.config, Stats: n.stats}
}

// Restore prepares a new device, before MMIO.Restore. The guest reads its
// address and its MTU only once, so they must not change.
func (n *Net) Restore(s NetState) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if s.Config != n.config {
		return fmt.Errorf("restore network device: guest knows configuration %x, device has %x", s.Config, n.config)
	}
	n.stats = s.Stats
	return nil
}
