package virtio

import "fmt"

// BlockState is a Block at rest: no request is in flight, those not begun are
// in the ring. It records what the guest was told about the disk, which is
// restored with a disk of its own.
type BlockState struct {
	Sectors  uint64
	ReadOnly bool
	ID       [blkIDLen]byte
}

// Save describes the device; it must be paused.
func (b *Block) Save() BlockState {
	b.mu.Lock()
	defer b.mu.Unlock()
	return BlockState{Sectors: b.sectors, ReadOnly: b.disk.ReadOnly(), ID: b.id}
}

// Restore prepares a fresh device, before MMIO.Restore. The new disk must hold
// what the guest knows of the old one.
func (b *Block) Restore(s BlockState) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch have := uint64(b.disk.Size()) / SectorSize; {
	case s.ReadOnly != b.disk.ReadOnly():
		return fmt.Errorf("restore block device: read-only %t in the state, %t on the disk", s.ReadOnly, b.disk.ReadOnly())
	case s.Sectors > have:
		return fmt.Errorf("restore block device: guest knows %d sectors, disk has %d", s.Sectors, have)
	}
	b.sectors, b.id = s.Sectors, s.ID
	b.describe()
	return nil
}
