package node

import (
	"sort"

	"agentrun.dev/internal/sandbox"
)

const mib = 1 << 20

// checkDisk refuses a disk that is too large even for an otherwise empty node.
func (m *Manager) checkDisk(s sandbox.TemplateSpec) error {
	if s.Disk == 0 {
		return nil
	}
	most, err := m.cfg.Engine.MaxDisk()
	if err != nil {
		return err
	}
	if s.Disk > most {
		return sandbox.InvalidDisk(s.Disk, most, "this node holds no more")
	}
	// If disks are in memory, they count against the memory that sandboxes may
	// reserve.
	capacity, need := m.capacity.capacity, m.cfg.Engine.Reserve
	if need(s.Memory, 0) > capacity || need(s.Memory, s.Disk) <= capacity {
		return nil // the former is refused when it has to run, with or without a disk
	}
	fits := sort.Search(int(s.Disk/mib), func(n int) bool { return need(s.Memory, uint64(n+1)*mib) > capacity })
	return sandbox.InvalidDisk(s.Disk, uint64(fits)*mib, "it is memory on this node, and beside the "+sandbox.Mebibytes(s.Memory)+" of the sandbox there is no more")
}
