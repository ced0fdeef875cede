package virtio

// RNGState is the state of a paused RNG. No guest depends on it.
type RNGState struct {
	Bytes uint64
}

// Save returns the state of the device, which must be paused.
func (r *RNG) Save() RNGState { return RNGState{Bytes: r.Bytes()} }

// Restore prepares a new device, before MMIO.Restore.
func (r *RNG) Restore(s RNGState) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bytes = s.Bytes
	return nil
}
