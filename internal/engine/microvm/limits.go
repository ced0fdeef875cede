package microvm

import (
	"fmt"
	"math/bits"
	"os"
	"slices"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm/vmmctl"
	"golang.org/x/sys/unix"
)

// What a VM costs beyond its RAM, all of which is charged to its cgroup: the
// process, KVM's structures and the buffers of its sockets and disks; and, by the
// page, the page tables of the process and of the guest and what KVM notes
// of each page.
const (
	overheadFixed  = 24 << 20
	overheadPerRAM = 64 // one byte for so many
)

// MemoryLimit is what a VM with this RAM can need at most.
func MemoryLimit(ram uint64) uint64 { return ram + ram/overheadPerRAM + overheadFixed }

// Reserve is what a sandbox can need at most. Its disk is on the host's, unless
// that is memory, too.
func (e *Engine) Reserve(ram, disk uint64) uint64 {
	if inMemory, err := onMemory(e.scratch); inMemory || err != nil {
		return MemoryLimit(ram) + disk
	}
	return MemoryLimit(ram)
}

// MaxDisk is the size of the file system that disks are written to.
func (e *Engine) MaxDisk() (uint64, error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(e.scratch.Fd()), &fs); err != nil {
		return 0, fmt.Errorf("look at the file system of %s: %w", e.scratch.Name(), err)
	}
	return min(fs.Blocks*uint64(fs.Bsize), layer.MaxSize), nil
}

// onMemory reports whether a file is on tmpfs or the like.
func onMemory(f *os.File) (bool, error) {
	var fs unix.Statfs_t
	err := unix.Fstatfs(int(f.Fd()), &fs)
	return fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC, err
}

// threadsFixed is room for the Go runtime's own threads and for those that
// control connections block; a vCPU and a device have one each.
const threadsFixed = 48

// machineLimits is what the process of a machine may take. tops has, for each
// disk, the file that is written to, or any on the same file system.
func machineLimits(ram, vcpus uint64, devices *vmmctl.Devices, tops []*os.File, asked engine.Limits) (jail.Limits, error) {
	l := jail.Limits{
		Memory: MemoryLimit(ram), MilliCPUs: asked.MilliCPUs, Background: asked.Background,
		Threads: threadsFixed + int(vcpus) + len(devices.Disks) + len(devices.Nets),
	}
	if l.MilliCPUs == 0 {
		l.MilliCPUs = (vcpus + 1) * 1000
	}
	for i := range devices.Disks {
		size, err := memoryOf(&devices.Disks[i], tops[i])
		if err != nil {
			return l, err
		}
		l.Memory += size
	}
	var err error
	l.IO, err = deviceLimits(devices.Disks, tops, asked.IO)
	return l, err
}

// deviceLimits is what the disks together may do to the device that their writable
// files are on, which an engine has in one folder. Each has its own token bucket;
// this bounds what gets past them, and holds whatever becomes of the vmm.
func deviceLimits(disks []vmmctl.Disk, tops []*os.File, asked engine.IOLimits) (jail.IO, error) {
	for i := range disks {
		if disks[i].ReadOnly || asked == (engine.IOLimits{}) {
			continue
		}
		device, err := jail.DeviceOf(tops[i])
		if err != nil {
			return jail.IO{}, fmt.Errorf("limit disk %s: %w", disks[i].ID, err)
		}
		n := uint64(len(disks)) // those that are only read may have their layers there
		return jail.IO{Device: device, BytesPerSecond: times(asked.BytesPerSecond, n), OpsPerSecond: times(asked.OpsPerSecond, n)}, nil
	}
	return jail.IO{}, nil
}

// times is a rate for n disks; one that is too high to be written down is none.
func times(rate, n uint64) uint64 {
	high, low := bits.Mul64(rate, n)
	if high != 0 {
		return 0
	}
	return low
}

// leastMaxFile is room for what a vmm writes whatever its guest is: the state of
// the machine, and its last words.
const leastMaxFile = 16 << 20

// maxFile is the length of the longest file that the vmm of a machine writes: a
// layer of its memory, the writable file of a disk, or a layer of that.
func maxFile(ram uint64, disks []uint64) uint64 {
	return max(ram, leastMaxFile, slices.Max(append(disks, 0)))
}

// writableSize is how much can be written to a disk.
func writableSize(d *vmmctl.Disk, top *os.File) (uint64, error) {
	if d.ReadOnly {
		return 0, nil
	}
	if d.Stack != nil {
		return d.Stack.Size, nil
	}
	info, err := top.Stat()
	if err != nil {
		return 0, fmt.Errorf("look at disk %s: %w", d.ID, err)
	}
	return uint64(info.Size()), nil
}

// memoryOf is how much memory a guest can fill by writing to a disk: all of it
// where the file is on tmpfs, since its pages are the VM's and can go nowhere.
func memoryOf(d *vmmctl.Disk, top *os.File) (uint64, error) {
	if d.ReadOnly {
		return 0, nil
	}
	inMemory, err := onMemory(top)
	if err != nil {
		return 0, fmt.Errorf("look at the file system of disk %s: %w", d.ID, err)
	}
	if !inMemory {
		return 0, nil
	}
	return writableSize(d, top)
}
