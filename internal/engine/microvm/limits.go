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

// overheadFixed and overheadPerRAM are the memory of a VM beyond its RAM. All of it
// is charged to its cgroup. The fixed part is the process, KVM's structures and the
// buffers of its sockets and disks. The part per page is the page tables of process
// and guest, and KVM's records of each page.
const (
	overheadFixed  = 24 << 20
	overheadPerRAM = 64 // one byte of overhead for this many bytes of RAM
)

// MemoryLimit is the maximum memory of a VM with this RAM.
func MemoryLimit(ram uint64) uint64 { return ram + ram/overheadPerRAM + overheadFixed }

// Reserve is the maximum memory of a sandbox. Its disk counts only if the host's
// folder for disks is in memory.
func (e *Engine) Reserve(ram, disk uint64) uint64 {
	if inMemory, err := onMemory(e.scratch); inMemory || err != nil {
		return MemoryLimit(ram) + disk
	}
	return MemoryLimit(ram)
}

// MaxDisk is the size of the file system that holds the disks.
func (e *Engine) MaxDisk() (uint64, error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(e.scratch.Fd()), &fs); err != nil {
		return 0, fmt.Errorf("look at the file system of %s: %w", e.scratch.Name(), err)
	}
	return min(fs.Blocks*uint64(fs.Bsize), layer.MaxSize), nil
}

// onMemory reports whether a file is on tmpfs or ramfs.
func onMemory(f *os.File) (bool, error) {
	var fs unix.Statfs_t
	err := unix.Fstatfs(int(f.Fd()), &fs)
	return fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC, err
}

// threadsFixed is the number of threads for the Go runtime itself and for blocked
// control connections. Each vCPU and each device adds one.
const threadsFixed = 48

// machineLimits are the limits of a machine's process. For each disk, tops has its
// top file, or any file on the same file system.
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

// deviceLimits are the limits of all disks together on the device that holds their
// top files. An engine has all top files in one folder. Each disk has its own token
// bucket; this limit bounds requests that get past the buckets, and holds even if the
// guest takes over the vmm.
func deviceLimits(disks []vmmctl.Disk, tops []*os.File, asked engine.IOLimits) (jail.IO, error) {
	for i := range disks {
		if disks[i].ReadOnly || asked == (engine.IOLimits{}) {
			continue
		}
		device, err := jail.DeviceOf(tops[i])
		if err != nil {
			return jail.IO{}, fmt.Errorf("limit disk %s: %w", disks[i].ID, err)
		}
		n := uint64(len(disks)) // read-only disks may have their layers on the device
		return jail.IO{Device: device, BytesPerSecond: times(asked.BytesPerSecond, n), OpsPerSecond: times(asked.OpsPerSecond, n)}, nil
	}
	return jail.IO{}, nil
}

// times is the rate for n disks. A rate that overflows becomes 0, which is no limit.
func times(rate, n uint64) uint64 {
	high, low := bits.Mul64(rate, n)
	if high != 0 {
		return 0
	}
	return low
}

// leastMaxFile is room for the files that any vmm writes, whatever its guest: the
// state of the machine and its last words.
const leastMaxFile = 16 << 20

// maxFile is the maximum length of any file that a machine's vmm writes: a layer of
// its memory, the top file of a disk, or a layer of a disk.
func maxFile(ram uint64, disks []uint64) uint64 {
	return max(ram, leastMaxFile, slices.Max(append(disks, 0)))
}

// writableSize is how many bytes can be written to a disk.
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

// memoryOf is how much memory a guest can fill by writing to a disk. If the file is
// on tmpfs, that is all of the disk: its pages are charged to the VM and cannot be
// written out.
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
