package virtio

import "fmt"

// BlockState is the state of a paused Block: no request is in flight, later
// ones are in the ring. It records the properties of the disk that the guest
// knows. A restored Block gets a disk of its own.
type BlockState struct {
	Sectors  uint64
	ReadOnly bool
	ID       [blkIDLen]byte
}

// Save returns the state of the device, which must be paused.
func (b *Block) Save() BlockState {
	b.mu.Lock()
	defer b.mu.Unlock()
	return BlockState{Sectors: b.sectors, ReadOnly: b.disk.ReadOnly(), ID: b.id}
}

// Restore prepares a new device, before MMIO.Restore. The new disk must have
// the properties of the old one that the guest knows.
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
