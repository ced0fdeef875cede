package kvm

import (
	"os"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

func openKVM(t *testing.T) *System {
	t.Helper()
	sys, err := Open()
	if err != nil {
		t.Fatalf("this test needs a /dev/kvm of any kind (make test runs it in the testbed where there is none): %v", err)
	}
	t.Cleanup(func() {
		if err := sys.Close(); err != nil {
			t.Errorf("close KVM: %v", err)
		}
	})
	return sys
}

// newVCPU makes a machine with the LAPIC in the kernel, as package vmm does.
func newVCPU(t *testing.T, sys *System) *VCPU {
	t.Helper()
	vm, err := sys.CreateVM()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := vm.Close(); err != nil {
			t.Errorf("close the VM: %v", err)
		}
	})
	if err := vm.EnableSplitIRQChip(24); err != nil {
		t.Fatal(err)
	}
	c, err := vm.CreateVCPU(0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("close the vCPU: %v", err)
		}
	})
	return c
}

func TestOpen(t *testing.T) {
	sys := openKVM(t)
	if sys.mmapSize < runAreaMin {
		t.Errorf("run area of %d bytes", sys.mmapSize)
	}
}

func TestFromFileRefusesOtherFiles(t *testing.T) {
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := FromFile(f); err == nil || !strings.Contains(err.Error(), "API version") {
		t.Errorf("%s taken for KVM: %v", os.DevNull, err)
	}
}

// TestCapabilities: KVM has all capabilities that our VMs need.
func TestCapabilities(t *testing.T) {
	sys := openKVM(t)
	for name, c := range map[string]Capability{
		"user memory":    CapUserMemory,
		"CPUID":          CapExtCPUID,
		"MP state":       CapMPState,
		"clock":          CapAdjustClock,
		"XSAVE":          CapXSave,
		"XCRs":           CapXCRS,
		"MSI":            CapSignalMSI,
		"split irqchip":  CapSplitIRQChip,
		"immediate exit": CapImmediateExit,
	} {
		if sys.CheckExtension(c) <= 0 {
			t.Errorf("KVM lacks %s (capability %d)", name, c)
		}
	}
	if got := sys.CheckExtension(1 << 20); got != 0 {
		t.Errorf("a capability that does not exist: %d", got)
	}
}

func TestSupportedCPUID(t *testing.T) {
	entries, err := openKVM(t).SupportedCPUID()
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Function == 0 {
			if e.EAX == 0 || e.EBX == 0 {
				t.Errorf("leaf 0 says nothing: %+v", e)
			}
			return
		}
	}
	t.Errorf("no leaf 0 among %d entries", len(entries))
}

func TestMSRIndexList(t *testing.T) {
	list, err := openKVM(t).MSRIndexList()
	if err != nil || len(list) == 0 {
		t.Errorf("%d MSRs, %v", len(list), err)
	}
}

// MSRs that every x86-64 processor has, and an index that does not exist.
const (
	msrSysenterESP = 0x175
	msrSysenterEIP = 0x176
	msrNone        = 0xdeadbeef
)

func TestMSRs(t *testing.T) {
	c := newVCPU(t, openKVM(t))
	if err := c.SetMSRs([]MSREntry{{Index: msrSysenterESP, Data: 0x1000}, {Index: msrSysenterEIP, Data: 0x2000}}); err != nil {
		t.Fatal(err)
	}
	for index, want := range map[uint32]uint64{msrSysenterESP: 0x1000, msrSysenterEIP: 0x2000} {
		if got, err := c.MSR(index); err != nil || got != want {
			t.Errorf("MSR %#x is %#x, %v; want %#x", index, got, err, want)
		}
	}
}

// TestSetMSRsNamesTheRefused: KVM accepts the first two, and the error names the
// third.
func TestSetMSRsNamesTheRefused(t *testing.T) {
	c := newVCPU(t, openKVM(t))
	err := c.SetMSRs([]MSREntry{{Index: msrSysenterESP}, {Index: msrSysenterEIP, Data: 7}, {Index: msrNone, Data: 1}, {Index: msrSysenterESP}})
	if err == nil || !strings.Contains(err.Error(), "0xdeadbeef") {
		t.Errorf("got %v, want an error that names MSR 0xdeadbeef", err)
	}
	if got, err := c.MSR(msrSysenterEIP); err != nil || got != 7 {
		t.Errorf("the MSR before the refused one is %d, %v", got, err)
	}
	if _, err := c.MSR(msrNone); err == nil || !strings.Contains(err.Error(), "0xdeadbeef") {
		t.Errorf("read of a missing MSR: %v", err)
	}
	// More than one call accepts.
	many := make([]MSREntry, 2*maxMSRs+1)
	for i := range many {
		many[i] = MSREntry{Index: msrSysenterEIP, Data: uint64(i)}
	}
	if err := c.SetMSRs(many); err != nil {
		t.Error(err)
	}
	if got, err := c.MSR(msrSysenterEIP); err != nil || got != uint64(len(many)-1) {
		t.Errorf("after %d writes the last is %d, %v", len(many), got, err)
	}
}

func TestRegisters(t *testing.T) {
	c := newVCPU(t, openKVM(t))
	want := Regs{RAX: 1, R15: 1 << 63, RIP: 0xfff0, RFLAGS: 2}
	if err := c.SetRegs(want); err != nil {
		t.Fatal(err)
	}
	if got, err := c.Regs(); err != nil || got != want {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	if err := c.SetCPUID(make([]CPUIDEntry, MaxCPUIDEntries+1)); err == nil {
		t.Error("more CPUID entries than fit were taken")
	}
}

// TestPreFault: memory is mapped for the guest before the guest runs. Without
// the capability PreFault returns an error.
func TestPreFault(t *testing.T) {
	sys := openKVM(t)
	vm, err := sys.CreateVM()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = vm.Close() }()
	const page, pages = 4096, 16
	memory, err := unix.Mmap(-1, 0, pages*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(memory) }()
	if err := vm.SetMemory(0, 0, pages*page, uintptr(unsafe.Pointer(&memory[0]))); err != nil {
		t.Fatal(err)
	}
	c, err := vm.CreateVCPU(0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	able := sys.CheckExtension(CapPreFaultMemory) != 0
	if err := c.PreFault(4*page, 8*page); (err == nil) != able {
		t.Errorf("%v, KVM can: %t", err, able)
	}
	there := make([]byte, pages)
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&memory[0])), pages*page, uintptr(unsafe.Pointer(&there[0]))); errno != 0 {
		t.Fatal(errno)
	}
	for i, b := range there {
		if want := able && i >= 4 && i < 12; b&1 != 0 != want {
			t.Errorf("page %d is there: %t", i, b&1 != 0)
		}
	}
	if err := c.PreFault(pages*page, page); err == nil {
		t.Error("there is no memory there")
	}
}
