package kvm

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// VM is one virtual machine. Closing it and all its vCPUs frees it.
type VM struct {
	sys *System
	fd  int
}

// CreateVM makes an empty machine.
func (s *System) CreateVM() (*VM, error) {
	fd, err := ioctl(s.fd(), reqCreateVM, 0)
	if err != nil {
		return nil, fmt.Errorf("create VM: %w", err)
	}
	return &VM{sys: s, fd: fd}, nil
}

// Close closes the descriptor.
func (v *VM) Close() error { return unix.Close(v.fd) }

// SetMemory maps size bytes at hostAddr into the guest at gpa.
func (v *VM) SetMemory(slot uint32, gpa, size uint64, hostAddr uintptr) error {
	r := memoryRegion{slot: slot, guestPhysAddr: gpa, size: size, hostAddr: uint64(hostAddr)}
	if _, err := ioctlPtr(v.fd, reqSetUserMemory, unsafe.Pointer(&r)); err != nil {
		return fmt.Errorf("set memory slot %d (%#x+%#x): %w", slot, gpa, size, err)
	}
	return nil
}

// SetTSSAddress tells Intel hosts where three pages of guest physical memory
// for the real-mode TSS may be; other hosts ignore it.
func (v *VM) SetTSSAddress(gpa uint64) error {
	if _, err := ioctl(v.fd, reqSetTSSAddr, uintptr(gpa)); err != nil {
		return fmt.Errorf("set TSS address: %w", err)
	}
	return nil
}

// EnableSplitIRQChip puts the LAPICs into the kernel and leaves the IOAPIC,
// with the given number of pins, to the caller.
func (v *VM) EnableSplitIRQChip(pins uint64) error {
	c := enableCap{cap: uint32(CapSplitIRQChip), args: [4]uint64{pins}}
	if _, err := ioctlPtr(v.fd, reqEnableCap, unsafe.Pointer(&c)); err != nil {
		return fmt.Errorf("enable split irqchip: %w", err)
	}
	return nil
}

// SignalMSI injects an interrupt message. It is delivered when the call
// returns, unlike a write to an irqfd. A message that no LAPIC accepts is not
// an error: the guest chose its destination. KVM returns -1 for it, which
// arrives here as EPERM (kvm_irq_delivery_to_apic).
func (v *VM) SignalMSI(m MSI) error {
	if _, err := ioctlPtr(v.fd, reqSignalMSI, unsafe.Pointer(&m)); err != nil && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("signal MSI: %w", err)
	}
	return nil
}

// Clock reads the guest's kvm-clock.
func (v *VM) Clock() (Clock, error) {
	var c Clock
	if _, err := ioctlPtr(v.fd, reqGetClock, unsafe.Pointer(&c)); err != nil {
		return c, fmt.Errorf("get clock: %w", err)
	}
	return c, nil
}

// SetClock sets the guest's kvm-clock.
func (v *VM) SetClock(c Clock) error {
	if _, err := ioctlPtr(v.fd, reqSetClock, unsafe.Pointer(&c)); err != nil {
		return fmt.Errorf("set clock: %w", err)
	}
	return nil
}

// VCPU is one virtual processor. Its methods belong to the thread that runs
// it, except SetImmediateExit.
type VCPU struct {
	fd  int
	run []byte
}

// CreateVCPU makes the processor with the given APIC id.
func (v *VM) CreateVCPU(id int) (*VCPU, error) {
	fd, err := ioctl(v.fd, reqCreateVCPU, uintptr(id))
	if err != nil {
		return nil, fmt.Errorf("create vCPU %d: %w", id, err)
	}
	run, err := unix.Mmap(fd, 0, v.sys.mmapSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("map run area of vCPU %d: %w", id, err), unix.Close(fd))
	}
	return &VCPU{fd: fd, run: run}, nil
}

// Close frees the processor. It must not be running.
func (c *VCPU) Close() error {
	return errors.Join(unix.Munmap(c.run), unix.Close(c.fd))
}

func (c *VCPU) get(what string, req uintptr, p unsafe.Pointer) error {
	if _, err := ioctlPtr(c.fd, req, p); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// Regs reads the general registers.
func (c *VCPU) Regs() (r Regs, err error) {
	if err := c.settle(); err != nil {
		return r, err
	}
	return r, c.get("get registers", reqGetRegs, unsafe.Pointer(&r))
}

// SetRegs writes the general registers.
func (c *VCPU) SetRegs(r Regs) error { return c.get("set registers", reqSetRegs, unsafe.Pointer(&r)) }

// Sregs reads the segment and control registers.
func (c *VCPU) Sregs() (s Sregs, err error) {
	if err := c.settle(); err != nil {
		return s, err
	}
	return s, c.get("get special registers", reqGetSregs, unsafe.Pointer(&s))
}

// SetSregs writes the segment and control registers.
func (c *VCPU) SetSregs(s Sregs) error {
	return c.get("set special registers", reqSetSregs, unsafe.Pointer(&s))
}

// LAPIC reads the local APIC.
func (c *VCPU) LAPIC() (l LAPIC, err error) {
	return l, c.get("get LAPIC", reqGetLAPIC, unsafe.Pointer(&l))
}

// SetLAPIC writes the local APIC.
func (c *VCPU) SetLAPIC(l *LAPIC) error { return c.get("set LAPIC", reqSetLAPIC, unsafe.Pointer(l)) }

// MPState reads the run state.
func (c *VCPU) MPState() (s MPState, err error) {
	return s, c.get("get MP state", reqGetMPState, unsafe.Pointer(&s))
}

// SetMPState writes the run state.
func (c *VCPU) SetMPState(s MPState) error {
	return c.get("set MP state", reqSetMPState, unsafe.Pointer(&s))
}

// SetCPUID sets the processor's CPUID. It must come before the first run.
func (c *VCPU) SetCPUID(entries []CPUIDEntry) error {
	if len(entries) > MaxCPUIDEntries {
		return fmt.Errorf("set CPUID: %d entries, at most %d", len(entries), MaxCPUIDEntries)
	}
	t := &cpuidTable{n: uint32(len(entries))}
	copy(t.entries[:], entries)
	return c.get("set CPUID", reqSetCPUID2, unsafe.Pointer(t))
}

// SetXCR0 writes the extended control register that enables parts of the
// processor's extended state.
func (c *VCPU) SetXCR0(value uint64) error {
	x := xcrs{n: 1}
	x.entries[0].value = value
	return c.get("set XCR0", reqSetXCRs, unsafe.Pointer(&x))
}

type msrTable struct {
	n, _    uint32
	entries [maxMSRs]MSREntry
}

// MSR reads one model-specific register.
func (c *VCPU) MSR(index uint32) (uint64, error) {
	t := &msrTable{n: 1}
	t.entries[0].Index = index
	n, err := ioctlPtr(c.fd, reqGetMSRs, unsafe.Pointer(t))
	if err != nil || n != 1 {
		return 0, fmt.Errorf("get MSR %#x: %w", index, errors.Join(err, unavailable(n)))
	}
	return t.entries[0].Data, nil
}

// SetMSRs writes model-specific registers in order. If KVM refuses one, the
// error names it.
func (c *VCPU) SetMSRs(entries []MSREntry) error {
	for len(entries) > 0 {
		t := &msrTable{n: uint32(min(len(entries), maxMSRs))}
		copy(t.entries[:], entries[:t.n])
		n, err := ioctlPtr(c.fd, reqSetMSRs, unsafe.Pointer(t))
		if err != nil {
			return fmt.Errorf("set MSRs: %w", err)
		}
		if n < int(t.n) {
			return fmt.Errorf("set MSR %#x: refused by KVM", entries[n].Index)
		}
		entries = entries[n:]
	}
	return nil
}

func unavailable(n int) error {
	if n == 0 {
		return errors.New("not available on this host")
	}
	return nil
}

// TSCFrequency is the guest's TSC frequency in kHz.
func (c *VCPU) TSCFrequency() (int, error) { return tscFrequency(c.fd) }

func tscFrequency(fd int) (int, error) {
	khz, err := ioctl(fd, reqGetTSCKHz, 0)
	if err != nil {
		return 0, fmt.Errorf("get TSC frequency: %w", err)
	}
	return khz, nil
}

// preFault is struct kvm_pre_fault_memory.
type preFault struct {
	gpa, size, flags uint64
	_                [5]uint64
}

// PreFault maps guest memory for the guest, as reads by the guest would. If the
// host's page is writable, it is mapped for writing, too. It needs
// CapPreFaultMemory and a vCPU that does not run.
func (c *VCPU) PreFault(gpa, size uint64) error {
	p := preFault{gpa: gpa, size: size}
	for p.size > 0 { // a signal may end it early; KVM updates p with its progress
		if err := c.get("map memory ahead", reqPreFaultMemory, unsafe.Pointer(&p)); err != nil {
			return err
		}
	}
	return nil
}
