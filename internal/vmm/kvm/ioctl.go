package kvm

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctl request numbers: _IO, _IOR, _IOW and _IOWR of asm-generic/ioctl.h
// with KVM's type 0xAE.
const (
	ioNone  = 0
	ioWrite = 1
	ioRead  = 2

	kvmType = 0xAE
)

// requests are all numbers that the function request has made. It is called
// only while the package is initialized.
var requests []uint32

func request(dir, nr, size uintptr) uintptr {
	r := dir<<30 | size<<16 | kvmType<<8 | nr
	requests = append(requests, uint32(r))
	return r
}

// Requests lists every ioctl that this package uses, for a system call filter.
func Requests() []uint32 { return slices.Clone(requests) }

var (
	reqGetAPIVersion     = request(ioNone, 0x00, 0)
	reqCreateVM          = request(ioNone, 0x01, 0)
	reqGetMSRIndexList   = request(ioRead|ioWrite, 0x02, 4)
	reqCheckExtension    = request(ioNone, 0x03, 0)
	reqGetVCPUMmapSize   = request(ioNone, 0x04, 0)
	reqGetSupportedCPUID = request(ioRead|ioWrite, 0x05, 8)
	reqCreateVCPU        = request(ioNone, 0x41, 0)
	reqSetUserMemory     = request(ioWrite, 0x46, unsafe.Sizeof(memoryRegion{}))
	reqSetTSSAddr        = request(ioNone, 0x47, 0)
	reqSetClock          = request(ioWrite, 0x7b, unsafe.Sizeof(Clock{}))
	reqGetClock          = request(ioRead, 0x7c, unsafe.Sizeof(Clock{}))
	reqRun               = request(ioNone, 0x80, 0)
	reqGetRegs           = request(ioRead, 0x81, unsafe.Sizeof(Regs{}))
	reqSetRegs           = request(ioWrite, 0x82, unsafe.Sizeof(Regs{}))
	reqGetSregs          = request(ioRead, 0x83, unsafe.Sizeof(Sregs{}))
	reqSetSregs          = request(ioWrite, 0x84, unsafe.Sizeof(Sregs{}))
	reqGetMSRs           = request(ioRead|ioWrite, 0x88, 8)
	reqSetMSRs           = request(ioWrite, 0x89, 8)
	reqGetLAPIC          = request(ioRead, 0x8e, unsafe.Sizeof(LAPIC{}))
	reqSetLAPIC          = request(ioWrite, 0x8f, unsafe.Sizeof(LAPIC{}))
	reqSetCPUID2         = request(ioWrite, 0x90, 8)
	reqGetMPState        = request(ioRead, 0x98, 4)
	reqSetMPState        = request(ioWrite, 0x99, 4)
	reqEnableCap         = request(ioWrite, 0xa3, unsafe.Sizeof(enableCap{}))
	reqGetTSCKHz         = request(ioNone, 0xa3, 0)
	reqSetXCRs           = request(ioWrite, 0xa7, unsafe.Sizeof(xcrs{}))
	reqSignalMSI         = request(ioWrite, 0xa5, unsafe.Sizeof(MSI{}))
	reqPreFaultMemory    = request(ioRead|ioWrite, 0xd5, unsafe.Sizeof(preFault{}))
)

// ioctl calls fd with a plain argument and retries EINTR.
func ioctl(fd int, req, arg uintptr) (int, error) {
	for {
		r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, arg)
		switch errno {
		case 0:
			return int(r), nil
		case unix.EINTR:
			continue
		default:
			return int(r), errno
		}
	}
}

// ioctlPtr calls fd with a pointer. The conversion happens in the call's
// argument list, so the object stays where it is until the call returns.
func ioctlPtr(fd int, req uintptr, arg unsafe.Pointer) (int, error) {
	for {
		r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, uintptr(arg))
		switch errno {
		case 0:
			return int(r), nil
		case unix.EINTR:
			continue
		default:
			return int(r), errno
		}
	}
}

// Capability is a KVM_CAP_* number.
type Capability uintptr

// Capabilities that the VMM uses.
const (
	CapUserMemory       Capability = 3
	CapExtCPUID         Capability = 7
	CapMPState          Capability = 14
	CapIRQRouting       Capability = 25
	CapAdjustClock      Capability = 39
	CapXSave            Capability = 55
	CapTSCControl       Capability = 60
	CapTSCDeadlineTimer Capability = 72
	CapSyncRegs         Capability = 74
	CapXCRS             Capability = 56
	CapSignalMSI        Capability = 77
	CapSplitIRQChip     Capability = 121
	CapX2APICAPI        Capability = 129
	CapImmediateExit    Capability = 136
	CapXSave2           Capability = 208
	CapVMTSCControl     Capability = 214
	CapPreFaultMemory   Capability = 236
)

// APIVersion is the only version of the stable KVM API.
const APIVersion = 12

// System is an open /dev/kvm.
type System struct {
	file     *os.File
	mmapSize int

	cpuidOnce sync.Once
	cpuid     []CPUIDEntry
	cpuidErr  error

	fresh freshVCPU

	capabilities sync.Map // results of CheckExtension by Capability; they never change
}

// Open opens /dev/kvm and checks the API version.
func Open() (*System, error) {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open KVM: %w", err)
	}
	s, err := FromFile(f)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return s, nil
}

// FromFile uses an open /dev/kvm, as a jailed process receives it.
func FromFile(f *os.File) (*System, error) {
	v, err := ioctl(int(f.Fd()), reqGetAPIVersion, 0)
	if err != nil {
		return nil, fmt.Errorf("ask KVM for its API version: %w", err)
	}
	if v != APIVersion {
		return nil, fmt.Errorf("KVM API version %d: only %d is supported", v, APIVersion)
	}
	size, err := ioctl(int(f.Fd()), reqGetVCPUMmapSize, 0)
	if err != nil {
		return nil, fmt.Errorf("ask KVM for the size of its run area: %w", err)
	}
	if size < runAreaMin {
		return nil, fmt.Errorf("KVM run area of %d bytes: at least %d expected", size, runAreaMin)
	}
	return &System{file: f, mmapSize: size}, nil
}

// Close closes /dev/kvm; VMs made from it continue to work.
func (s *System) Close() error { return s.file.Close() }

func (s *System) fd() int { return int(s.file.Fd()) }

// CheckExtension returns KVM's answer for a capability, 0 if KVM lacks it.
func (s *System) CheckExtension(c Capability) int {
	if r, ok := s.capabilities.Load(c); ok {
		return r.(int)
	}
	r, err := ioctl(s.fd(), reqCheckExtension, uintptr(c))
	if err != nil {
		return 0
	}
	s.capabilities.Store(c, r)
	return r
}

// MaxCPUIDEntries is KVM's own limit (KVM_MAX_CPUID_ENTRIES).
const MaxCPUIDEntries = 256

type cpuidTable struct {
	n, _    uint32
	entries [MaxCPUIDEntries]CPUIDEntry
}

// SupportedCPUID lists the CPUID entries that the host and KVM can offer a
// guest. It asks KVM only once: if the host is itself a guest, KVM's hundred
// CPUID instructions cost as much as a VM.
func (s *System) SupportedCPUID() ([]CPUIDEntry, error) {
	s.cpuidOnce.Do(func() {
		t := &cpuidTable{n: MaxCPUIDEntries}
		if _, err := ioctlPtr(s.fd(), reqGetSupportedCPUID, unsafe.Pointer(t)); err != nil {
			s.cpuidErr = fmt.Errorf("get supported CPUID: %w", err)
			return
		}
		s.cpuid = slices.Clone(t.entries[:t.n])
	})
	return slices.Clone(s.cpuid), s.cpuidErr
}

// maxMSRIndices is more than any KVM lists. maxMSRs is how many one call
// accepts (fewer than MAX_IO_MSRS).
const (
	maxMSRIndices = 1024
	maxMSRs       = 255
)

// MSRIndexList lists the MSRs that make up a vCPU's state on this host.
func (s *System) MSRIndexList() ([]uint32, error) {
	var l struct {
		n       uint32
		indices [maxMSRIndices]uint32
	}
	l.n = maxMSRIndices
	if _, err := ioctlPtr(s.fd(), reqGetMSRIndexList, unsafe.Pointer(&l)); err != nil {
		return nil, fmt.Errorf("get MSR index list: %w", err)
	}
	return append([]uint32(nil), l.indices[:l.n]...), nil
}
