package vmm

import (
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/vmm/kvm"
)

// errNotPaused: the state of a running machine cannot be saved.
var errNotPaused = errors.New("the guest is not paused")

// Save returns the state of a paused machine, without its memory and disks.
func (vm *VM) Save(sys *kvm.System) (*State, error) {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	if !vm.paused || vm.closed {
		return nil, fmt.Errorf("save: %w", errNotPaused)
	}
	s := &State{
		Profile: vm.profile, Memory: vm.mem.Size(), Clock: *vm.stopped,
		IOAPIC: vm.ioapic.save(), Serial: vm.serial.save(),
	}
	s.Standby = vm.vsock != nil && vm.vsock.Save().HasStandby()
	khz, err := vm.vcpus[0].kvm.TSCFrequency()
	if err != nil {
		return nil, fmt.Errorf("save: %w", err)
	}
	s.TSCKHz = uint32(khz)
	indices, err := sys.MSRIndexList()
	if err != nil {
		return nil, fmt.Errorf("save: %w", err)
	}
	size := vm.kvm.XSaveSize()
	for _, c := range vm.vcpus {
		state, err := saveVCPU(c.kvm, size, indices)
		if err != nil {
			return nil, fmt.Errorf("save vCPU %d: %w", c.id, err)
		}
		s.VCPUs = append(s.VCPUs, state)
	}
	for i, d := range vm.windows.virtio {
		mmio, err := d.Save()
		if err != nil {
			return nil, fmt.Errorf("save: %w", err)
		}
		own, err := d.save()
		if err != nil {
			return nil, fmt.Errorf("save virtio device %d: %w", i, err)
		}
		s.Devices = append(s.Devices, DeviceState{mmio, own})
	}
	return s, nil
}

// saveVCPU reads a vCPU in the order that KVM requires: first the run state,
// because reading it processes pending INIT and SIPI; last the events.
func saveVCPU(c *kvm.VCPU, xsaveSize int, msrs []uint32) (s VCPUState, err error) {
	read := func(what func() error) {
		if err == nil {
			err = what()
		}
	}
	read(func() (err error) { s.MPState, err = c.MPState(); return err })
	read(func() (err error) { s.Regs, err = c.Regs(); return err })
	read(func() (err error) { s.Sregs, err = c.Sregs(); return err })
	read(func() (err error) { s.XCR0, err = c.XCR0(); return err })
	s.XSave = make([]byte, xsaveSize)
	read(func() error { return c.XSave(s.XSave) })
	read(func() (err error) { s.DebugRegs, err = c.DebugRegs(); return err })
	read(func() (err error) { s.LAPIC, err = c.LAPIC(); return err })
	read(func() (err error) { s.MSRs, err = c.MSRs(msrs); return err })
	read(func() (err error) { s.Events, err = c.Events(); return err })
	return s, err
}

// ChangedMemory lists the pages of a paused machine that differ from its
// initial layers; pages of zeros are listed separately. pagemap is the
// process's /proc/self/pagemap.
func (vm *VM) ChangedMemory(pagemap *os.File) (data, zeros []extent.Run, err error) {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	if !vm.paused || vm.closed {
		return nil, nil, fmt.Errorf("list changed memory: %w", errNotPaused)
	}
	return vm.mem.Changed(pagemap)
}

// TouchedMemory lists the pages that the guest has written and, if the machine
// is watched, those that it has only read. The guest may run.
func (vm *VM) TouchedMemory(pagemap *os.File) (written, read []extent.Run, err error) {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	if vm.closed {
		return nil, nil, fmt.Errorf("list memory: %w", ErrEnded)
	}
	return vm.mem.Touched(pagemap)
}

// WriteMemory writes pieces of a paused machine's memory, one after the other.
func (vm *VM) WriteMemory(w io.Writer, runs []extent.Run) error {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	if !vm.paused || vm.closed {
		return fmt.Errorf("write memory: %w", errNotPaused)
	}
	return vm.mem.WriteRuns(w, runs)
}
