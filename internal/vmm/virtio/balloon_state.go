package virtio

// BalloonState is a Balloon at rest. Which pages are inflated is known to the
// guest alone.
type BalloonState struct {
	TargetPages    uint32
	ActualPages    uint32
	DiscardedBytes uint64
	RefusedRanges  uint64
}

// Save describes the device; it must be paused.
func (b *Balloon) Save() BalloonState { return BalloonState(b.Stats()) }

// Restore prepares a fresh device, before MMIO.Restore.
func (b *Balloon) Restore(s BalloonState) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.target, b.actual = s.TargetPages, s.ActualPages
	b.discarded, b.refused = s.DiscardedBytes, s.RefusedRanges
	return nil
}
