package kvm

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// supported gives a vCPU the features of its host: without them it has no
// extended state to test.
func supported(t *testing.T, sys *System, c *VCPU) {
	t.Helper()
	entries, err := sys.SupportedCPUID()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.SetCPUID(entries); err != nil {
		t.Fatal(err)
	}
}

// TestVCPUState: the state read from one vCPU can be set on another.
func TestVCPUState(t *testing.T) {
	sys := openKVM(t)
	a, b := newVCPU(t, sys), newVCPU(t, sys)
	supported(t, sys, a)
	supported(t, sys, b)

	xsave := make([]byte, MinXSaveSize)
	if err := a.XSave(xsave); err != nil {
		t.Fatal(err)
	}
	// The x87 control word, at the start of the legacy area, and the bit that
	// marks that area as used (XSTATE_BV, Intel SDM vol. 1 §13.4).
	xsave[0], xsave[1] = 0x7f, 0x02
	xsave[512] |= 1
	again := make([]byte, MinXSaveSize)
	if err := errors.Join(b.SetXSave(xsave), b.XSave(again)); err != nil || !bytes.Equal(again[:2], xsave[:2]) {
		t.Errorf("x87 control word %x became %x (%v)", xsave[:2], again[:2], err)
	}
	if err := b.XSave(make([]byte, 100)); err == nil {
		t.Error("100 bytes were taken for an extended state")
	}
	if err := b.SetXSave(make([]byte, 100)); err == nil {
		t.Error("an extended state of 100 bytes was set")
	}

	if x, err := a.XCR0(); err != nil || x&1 == 0 {
		t.Errorf("XCR0 %#x, %v", x, err)
	}
	debug, err := a.DebugRegs()
	if err != nil {
		t.Fatal(err)
	}
	debug[0] = 0x55 // DR0
	if err := b.SetDebugRegs(&debug); err != nil {
		t.Fatal(err)
	}
	if got, err := b.DebugRegs(); err != nil || got != debug {
		t.Errorf("debug registers %x became %x (%v)", debug, got, err)
	}
	events, err := a.Events()
	if err != nil {
		t.Fatal(err)
	}
	if err := b.SetEvents(&events); err != nil {
		t.Error(err)
	}
	// A vCPU without kvm-clock accepts the call.
	if err := b.ClockStopped(); err != nil {
		t.Error(err)
	}
}

// TestStageRegs: the staged registers take effect, whether they are read or the
// vCPU runs first.
func TestStageRegs(t *testing.T) {
	sys := openKVM(t)
	if !(&VM{sys: sys}).StagesRegs() {
		t.Fatal("this KVM is older than Linux 4.17, since which all stage registers")
	}
	for name, first := range map[string]func(*VCPU) error{
		"read": func(*VCPU) error { return nil },
		"run": func(c *VCPU) error {
			c.SetImmediateExit(true)
			if err := c.Run(); !errors.Is(err, unix.EINTR) {
				return fmt.Errorf("run: %w", err)
			}
			if c.staged().dirty != 0 {
				return errors.New("the run has not taken them")
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newVCPU(t, sys)
			wantSregs, err := c.Sregs()
			if err != nil {
				t.Fatal(err)
			}
			wantSregs.CS.Base, wantSregs.CS.Selector, wantSregs.CR2 = 0x3000, 0x300, 0x1234
			want := Regs{RAX: 1, R15: 1 << 63, RIP: 0x100, RFLAGS: 2}
			c.StageRegs(want, wantSregs)
			if err := first(c); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if got, err := c.Regs(); err != nil || got != want {
					t.Errorf("%+v, not %+v (%v)", got, want, err)
				}
				if got, err := c.Sregs(); err != nil || got != wantSregs {
					t.Errorf("%+v, not %+v (%v)", got, wantSregs, err)
				}
			}
			// They are loaded only once.
			want.RAX = 2
			if err := c.SetRegs(want); err != nil {
				t.Fatal(err)
			}
			if got, err := c.Regs(); err != nil || got != want {
				t.Errorf("%+v, not %+v (%v)", got, want, err)
			}
		})
	}
}

// TestFresh: the initial registers are read only once, and again for other
// registers.
func TestFresh(t *testing.T) {
	sys := openKVM(t)
	vm, err := sys.CreateVM()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = vm.Close() }()
	c, err := vm.CreateVCPU(0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	khz, err := c.TSCFrequency()
	for range 2 {
		if got, freshErr := vm.FreshTSCFrequency(c); err != nil || freshErr != nil || got != khz {
			t.Errorf("%d kHz, not %d (%v, %v)", got, khz, err, freshErr)
		}
	}
	for _, indices := range [][]uint32{{msrSysenterESP}, {msrSysenterESP}, {msrSysenterEIP, msrNone, msrSysenterESP}} {
		want, err := c.MSRs(indices)
		got, freshErr := vm.FreshMSRs(c, indices)
		if err != nil || freshErr != nil || !slices.Equal(got, want) || len(got) == 0 {
			t.Errorf("%v, not %v (%v, %v)", got, want, err, freshErr)
		}
	}
	before, err := vm.FreshMSRs(c, []uint32{msrSysenterEIP})
	if err = errors.Join(err, c.SetMSRs([]MSREntry{{Index: msrSysenterEIP, Data: 7}})); err != nil {
		t.Fatal(err)
	}
	if after, err := vm.FreshMSRs(c, []uint32{msrSysenterEIP}); err != nil || !slices.Equal(before, after) {
		t.Errorf("%v, asked again: %v (%v)", before, after, err)
	}
}

// TestMSRList: registers that a vCPU does not have are left out. The others are
// complete and in order, however many are read.
func TestMSRList(t *testing.T) {
	sys := openKVM(t)
	c := newVCPU(t, sys)
	supported(t, sys, c)
	indices, err := sys.MSRIndexList()
	if err != nil {
		t.Fatal(err)
	}
	known, err := c.MSRs(indices)
	if err != nil || len(known) < len(indices)/2 {
		t.Fatalf("%d of %d, %v", len(known), len(indices), err)
	}
	const unknown = 0x12345678
	var asked []uint32
	for range 3 {
		for _, m := range known {
			asked = append(asked, unknown, m.Index)
		}
	}
	got, err := c.MSRs(append(asked, unknown))
	if err != nil || len(got) != 3*len(known) {
		t.Fatalf("%d of %d, %v", len(got), 3*len(known), err)
	}
	for i, m := range got {
		if m.Index != known[i%len(known)].Index {
			t.Fatalf("place %d has %#x, not %#x", i, m.Index, known[i%len(known)].Index)
		}
	}
}

// TestTSCOffset: the offset that was set can be read. kvm-pvm, which shows
// guests the host's counter, accepts an offset and forgets it.
func TestTSCOffset(t *testing.T) {
	c := newVCPU(t, openKVM(t))
	want := uint64(1 << 50)
	if err := c.SetTSCOffset(want); errors.Is(err, unix.ENXIO) {
		t.Fatal("this kernel is older than 5.16, where vCPUs learnt to say their TSC offset")
	} else if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/sys/module/kvm_pvm"); err == nil {
		want = 0
	}
	if got, err := c.TSCOffset(); err != nil || got != want {
		t.Errorf("offset %d, not %d (%v)", got, want, err)
	}
	if a, b := HostTSC(), HostTSC(); a == 0 || b < a {
		t.Errorf("the host's counter went from %d to %d", a, b)
	}
}
