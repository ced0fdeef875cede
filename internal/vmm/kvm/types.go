package kvm

import "unsafe"

// Regs is struct kvm_regs.
type Regs struct {
	RAX, RBX, RCX, RDX, RSI, RDI, RSP, RBP uint64
	R8, R9, R10, R11, R12, R13, R14, R15   uint64
	RIP, RFLAGS                            uint64
}

// Segment is struct kvm_segment.
type Segment struct {
	Base     uint64
	Limit    uint32
	Selector uint16
	Type     uint8
	Present  uint8
	DPL      uint8
	DB       uint8
	S        uint8
	L        uint8
	G        uint8
	AVL      uint8
	Unusable uint8
	_        uint8
}

// DescriptorTable is struct kvm_dtable.
type DescriptorTable struct {
	Base  uint64
	Limit uint16
	_     [3]uint16
}

// Sregs is struct kvm_sregs.
type Sregs struct {
	CS, DS, ES, FS, GS, SS, TR, LDT Segment
	GDT, IDT                        DescriptorTable
	CR0, CR2, CR3, CR4, CR8         uint64
	EFER, APICBase                  uint64
	InterruptBitmap                 [4]uint64
}

// CPUIDEntry is struct kvm_cpuid_entry2.
type CPUIDEntry struct {
	Function, Index    uint32
	Flags              uint32
	EAX, EBX, ECX, EDX uint32
	_                  [3]uint32
}

// CPUIDSignificantIndex says that Index selects a subleaf.
const CPUIDSignificantIndex = 1

// MSREntry is struct kvm_msr_entry.
type MSREntry struct {
	Index uint32
	_     uint32
	Data  uint64
}

// Clock is struct kvm_clock_data.
type Clock struct {
	Clock    uint64
	Flags    uint32
	_        uint32
	Realtime uint64
	HostTSC  uint64
	_        [4]uint32
}

// LAPIC is struct kvm_lapic_state: the register page, in xAPIC layout.
type LAPIC struct{ Regs [1024]byte }

// MSI is struct kvm_msi.
type MSI struct {
	AddressLo, AddressHi uint32
	Data                 uint32
	Flags                uint32
	DevID                uint32
	_                    [12]byte
}

// MPState is the run state of a vCPU (KVM_MP_STATE_*).
type MPState uint32

// Run states that occur with an in-kernel LAPIC.
const (
	MPRunnable      MPState = 0
	MPUninitialized MPState = 1
	MPInitReceived  MPState = 2
	MPHalted        MPState = 3
	MPSIPIReceived  MPState = 4
)

type memoryRegion struct {
	slot, flags   uint32
	guestPhysAddr uint64
	size          uint64
	hostAddr      uint64
}

type enableCap struct {
	cap, flags uint32
	args       [4]uint64
	_          [64]byte
}

// xcrs is struct kvm_xcrs.
type xcrs struct {
	n, flags uint32
	entries  [16]struct {
		index, _ uint32
		value    uint64
	}
	_ [16]uint64
}

// The kernel's ABI; a wrong size does not compile.
var (
	_ [144]byte  = [unsafe.Sizeof(Regs{})]byte{}
	_ [24]byte   = [unsafe.Sizeof(Segment{})]byte{}
	_ [312]byte  = [unsafe.Sizeof(Sregs{})]byte{}
	_ [40]byte   = [unsafe.Sizeof(CPUIDEntry{})]byte{}
	_ [16]byte   = [unsafe.Sizeof(MSREntry{})]byte{}
	_ [48]byte   = [unsafe.Sizeof(Clock{})]byte{}
	_ [1024]byte = [unsafe.Sizeof(LAPIC{})]byte{}
	_ [64]byte   = [unsafe.Sizeof(preFault{})]byte{}
	_ [32]byte   = [unsafe.Sizeof(MSI{})]byte{}
	_ [32]byte   = [unsafe.Sizeof(memoryRegion{})]byte{}
	_ [104]byte  = [unsafe.Sizeof(enableCap{})]byte{}
	_ [392]byte  = [unsafe.Sizeof(xcrs{})]byte{}
)
