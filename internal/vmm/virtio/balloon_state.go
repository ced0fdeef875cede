package virtio

// BalloonState is the state of a paused Balloon. Only the guest knows which
// pages are inflated.
type BalloonState struct {
	TargetPages    uint32
	ActualPages    uint32
	DiscardedBytes uint64
	RefusedRanges  uint64
}

// Save returns the state of the device, which must be paused.
func (b *Balloon) Save() BalloonState { return BalloonState(b.Stats()) }

// Restore prepares a new device, before MMIO.Restore.
func (b *Balloon) Restore(s BalloonState) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.target, b.actual = s.TargetPages, s.ActualPages
	b.discarded, b.refused = s.DiscardedBytes, s.RefusedRanges
	return nil
}
