package virtio

// RNGState is an RNG at rest. It has no state that a guest depends on.
type RNGState struct {
	Bytes uint64
}

// Save describes the device; it must be paused.
func (r *RNG) Save() RNGState { return RNGState{Bytes: r.Bytes()} }

// Restore prepares a fresh device, before MMIO.Restore.
func (r *RNG) Restore(s RNGState) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bytes = s.Bytes
	return nil
}
