package vmm

import (
	"errors"
	"fmt"
	"slices"

	"agentrun.dev/internal/vmm/kvm"
	"agentrun.dev/internal/vmm/vmstate"
)

// Load puts a saved machine into the spare, with devices of its own. Start runs
// it, and the guest's time continues from there.
func (s *Spare) Load(state *State, devices Devices) (*VM, error) {
	vm := s.take()
	if vm == nil {
		return nil, errors.Join(errors.New("restore: the spare was used before"), devices.close())
	}
	if err := vm.load(state, devices); err != nil {
		return nil, errors.Join(fmt.Errorf("restore: %w", err), vm.free(), devices.close())
	}
	return vm, nil
}

func (vm *VM) load(state *State, devices Devices) error {
	switch {
	case state.Profile != vm.profile:
		return fmt.Errorf("the state is of CPU profile %q, the machine has %q", state.Profile, vm.profile)
	case state.Memory != vm.mem.Size():
		return fmt.Errorf("the state is of %d MiB of memory, the machine has %d", state.Memory>>20, vm.mem.Size()>>20)
	case len(state.VCPUs) != len(vm.vcpus):
		return fmt.Errorf("the state is of %d vCPUs, the machine has %d", len(state.VCPUs), len(vm.vcpus))
	}
	if err := devices.validate(); err != nil {
		return err
	}
	for i, c := range vm.vcpus {
		if err := loadVCPU(c, &state.VCPUs[i], int(state.TSCKHz), vm.kvm.XSaveSize()); err != nil {
			return fmt.Errorf("vCPU %d: %w", i, err)
		}
	}
	if err := vm.createDevices(devices, state); err != nil {
		return err
	}
	clock := state.Clock
	vm.stopped = &clock
	// This comes before any vCPU runs. The guest's kernel compares the id
	// whenever random numbers are drawn, so that no random number is drawn
	// twice.
	if err := vm.writeGenerationID(); err != nil {
		return err
	}
	if d := vm.devices.Vsock; d != nil && d.Standby != nil {
		standby := d.Standby
		d.Standby = nil // from here on the device owns it
		return vm.vsock.AttachStandby(standby, vm.announceLater)
	}
	return vm.announceGenerationID()
}

// announceLater interrupts the guest's kernel, which then tells all of its parts
// that it is a copy. It runs when the guest is used after its first answer. So
// the user of the standby connection does not wait for the ACPI interpreter, and
// a copy that only waits does not own the pages that the interpreter and the
// kernel's log write to. Random numbers do not depend on the interrupt: the id
// is already in memory.
func (vm *VM) announceLater() {
	if err := vm.announceGenerationID(); err != nil {
		vm.end(vmstate.Exit{Reason: vmstate.InternalError, Detail: err.Error()})
	}
}

// msrAPICBase is also part of the special registers.
const msrAPICBase = 0x1b

// otherMSRs are not set with the rest. startClock sets those of the clock.
// Setting the place of the wall clock is a request (KVM writes the time there,
// once), which a guest makes itself when it needs the time.
var otherMSRs = []uint32{msrTSC, msrTSCDeadline, msrKVMWallClock, msrKVMWallClockNew}

// loadVCPU puts a new vCPU into a saved state. The APIC's mode decides the meaning
// of the rest of the APIC, so it comes early; events come last, when no other call
// can disturb them. Mostly the first run sets the registers by itself. Values that
// a new vCPU already has are not set: each call costs a hundredth of making a VM.
func loadVCPU(v *vcpu, s *VCPUState, tscKHz, xsaveSize int) (err error) {
	c := v.kvm
	do := func(step func() error) {
		if err == nil {
			err = step()
		}
	}
	v.clockless = !usesClock(s.MSRs)
	do(func() error { return matchTSC(v.vm.kvm, c, tscKHz) })
	do(func() error {
		if s.XCR0 == v.xcr0 {
			return nil // KVM would compute the CPUID leaves that depend on it again, by dozens of CPUID instructions
		}
		return c.SetXCR0(s.XCR0)
	})
	do(func() error {
		if len(s.XSave) != xsaveSize {
			return fmt.Errorf("the extended state has %d bytes, this host's has %d: the snapshot is from another kind of processor", len(s.XSave), xsaveSize)
		}
		return c.SetXSave(s.XSave)
	})
	msrs := s.MSRs
	staged := v.vm.kvm.StagesRegs() && stageable(s)
	if staged {
		msrs = append(slices.Clone(msrs), kvm.MSREntry{Index: msrAPICBase, Data: s.Sregs.APICBase})
	} else {
		do(func() error { return c.SetSregs(s.Sregs) })
		do(func() error { return c.SetRegs(s.Regs) })
	}
	do(func() error { return setChangedMSRs(v.vm.kvm, c, msrs) })
	do(func() error { return c.SetLAPIC(&s.LAPIC) })
	if s.DebugRegs != kvm.ResetDebugRegs {
		do(func() error { return c.SetDebugRegs(&s.DebugRegs) })
	}
	if first := v.id == 0; !first || s.MPState != kvm.MPRunnable {
		do(func() error { return c.SetMPState(s.MPState) })
	}
	if !s.Events.None() {
		do(func() error { return c.SetEvents(&s.Events) })
	}
	if staged && err == nil {
		c.StageRegs(s.Regs, s.Sregs)
	}
	return err
}

// stageable reports whether the first run may set the vCPU's registers. It must
// not if events are in progress, because the registers would disturb them. A
// vCPU that waits for its start-up message would set them only after the
// message.
func stageable(s *VCPUState) bool {
	return s.Events.None() && (s.MPState == kvm.MPRunnable || s.MPState == kvm.MPHalted)
}

// matchTSC makes sure that the guest's TSC keeps its frequency. KVM accepts a
// frequency close to the host's, and needs TSC scaling for others.
func matchTSC(vm *kvm.VM, c *kvm.VCPU, khz int) error {
	have, err := vm.FreshTSCFrequency(c)
	if err != nil || have == khz {
		return err
	}
	if err := c.SetTSCFrequency(khz); err != nil {
		return fmt.Errorf("the snapshot's TSC has %d kHz, this host's %d, and it cannot scale: restore it where it was taken: %w", khz, have, err)
	}
	return nil
}

// setChangedMSRs writes the registers whose values a fresh vCPU does not
// already have.
func setChangedMSRs(vm *kvm.VM, c *kvm.VCPU, saved []kvm.MSREntry) error {
	indices := make([]uint32, len(saved))
	for i, m := range saved {
		indices[i] = m.Index
	}
	fresh, err := vm.FreshMSRs(c, indices)
	if err != nil {
		return err
	}
	changed := make([]kvm.MSREntry, 0, len(saved))
	for _, m := range saved {
		// fresh has the same order, but may lack some registers.
		same := false
		if len(fresh) > 0 && fresh[0].Index == m.Index {
			same = fresh[0].Data == m.Data
			fresh = fresh[1:]
		}
		if !same && !slices.Contains(otherMSRs, m.Index) {
			changed = append(changed, m)
		}
	}
	return c.SetMSRs(changed)
}
