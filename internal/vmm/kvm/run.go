package kvm

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ExitReason says why KVM_RUN came back (KVM_EXIT_*).
type ExitReason uint32

// The exit reasons that our VMs can have.
const (
	ExitUnknown       ExitReason = 0
	ExitException     ExitReason = 1
	ExitIO            ExitReason = 2
	ExitHypercall     ExitReason = 3
	ExitDebug         ExitReason = 4
	ExitHLT           ExitReason = 5
	ExitMMIO          ExitReason = 6
	ExitIRQWindow     ExitReason = 7
	ExitShutdown      ExitReason = 8
	ExitFailEntry     ExitReason = 9
	ExitIntr          ExitReason = 10
	ExitInternalError ExitReason = 17
	ExitSystemEvent   ExitReason = 24
	ExitIOAPICEOI     ExitReason = 26
	ExitMemoryFault   ExitReason = 39
)

// Offsets in struct kvm_run.
const (
	offImmediateExit = 1
	offExitReason    = 8
	offUnion         = 32
	offDirtyRegs     = 296
	offSyncRegs      = 304 // struct kvm_sync_regs: Regs, then Sregs
	runAreaMin       = 2352
)

// Parts of struct kvm_sync_regs (KVM_SYNC_X86_*).
const (
	syncRegs  = 1 << 0
	syncSregs = 1 << 1
)

// IOExit is one port access. Data aliases the run area: the answer to a read is
// written into it.
type IOExit struct {
	Write bool
	Port  uint16
	Size  int
	// Data holds Count accesses of Size bytes each.
	Data []byte
}

// MMIOExit is one memory access outside RAM. Data aliases the run area.
type MMIOExit struct {
	Write bool
	Addr  uint64
	Data  []byte
}

// InternalError is KVM_EXIT_INTERNAL_ERROR.
type InternalError struct {
	Suberror uint32
	Data     []uint64
}

// Run enters the guest until it exits. It returns unix.EINTR when a signal or
// an immediate exit ended the run; the exit reason is not valid then.
func (c *VCPU) Run() error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(c.fd), reqRun, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// SetImmediateExit makes the next or the current Run return at once, when a
// signal follows. Any thread may call it.
//
// The field is one byte. Neither the kernel nor this process writes to its
// neighbours in the same aligned word (request_interrupt_window and padding)
// while a VM uses the in-kernel LAPIC, so a 32-bit atomic store is exact.
func (c *VCPU) SetImmediateExit(on bool) {
	var v uint32
	if on {
		v = 1 << (8 * offImmediateExit)
	}
	// Invariant: run is a live, page-aligned mapping of at least runAreaMin bytes.
	atomic.StoreUint32((*uint32)(unsafe.Pointer(unsafe.SliceData(c.run))), v)
}

// ExitReason is the reason why the last Run returned.
func (c *VCPU) ExitReason() ExitReason {
	return ExitReason(binary.LittleEndian.Uint32(c.run[offExitReason:]))
}

// IO decodes an ExitIO. The layout comes from the kernel, not from the guest,
// but is checked anyway.
func (c *VCPU) IO() IOExit {
	u := c.run[offUnion:]
	size, count := uint64(u[1]), uint64(binary.LittleEndian.Uint32(u[4:]))
	off := binary.LittleEndian.Uint64(u[8:])
	total := size * count
	if size == 0 || off > uint64(len(c.run)) || total > uint64(len(c.run))-off {
		return IOExit{}
	}
	return IOExit{
		Write: u[0] == 1,
		Port:  binary.LittleEndian.Uint16(u[2:]),
		Size:  int(size),
		Data:  c.run[off : off+total : off+total],
	}
}

// MMIO decodes an ExitMMIO.
func (c *VCPU) MMIO() MMIOExit {
	u := c.run[offUnion:]
	n := min(binary.LittleEndian.Uint32(u[16:]), 8)
	return MMIOExit{
		Write: u[20] != 0,
		Addr:  binary.LittleEndian.Uint64(u),
		Data:  u[8 : 8+n : 8+n],
	}
}

// FailEntryReason decodes an ExitFailEntry.
func (c *VCPU) FailEntryReason() uint64 { return binary.LittleEndian.Uint64(c.run[offUnion:]) }

// InternalError decodes an ExitInternalError.
func (c *VCPU) InternalError() InternalError {
	u := c.run[offUnion:]
	e := InternalError{Suberror: binary.LittleEndian.Uint32(u)}
	for i := range min(binary.LittleEndian.Uint32(u[4:]), 16) {
		e.Data = append(e.Data, binary.LittleEndian.Uint64(u[8+8*i:]))
	}
	return e
}
