package vmm

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/vmm/cpu"
	"agentrun.dev/internal/vmm/guestmem"
	"agentrun.dev/internal/vmm/kvm"
)

// SpareConfig describes a spare.
type SpareConfig struct {
	// KVM is the open virtualization interface. The caller keeps it.
	KVM *kvm.System
	// Memory is the RAM in bytes, VCPUs the number of processors.
	Memory uint64
	VCPUs  int
	// Profile names the CPU features; empty means cpu.HostV1.
	Profile cpu.Profile
	// Layers is the content of the RAM; the rest is zeros. The caller keeps the
	// files.
	Layers []guestmem.Mapping
	// Written lists pages that the guest will write to at once, Read those that it
	// will only read.
	Written, Read []extent.Run
	// Watch is an open /dev/userfaultfd or nil. With it TouchedMemory also lists
	// the pages that the guest has read. The caller keeps it.
	Watch *os.File
}

// Spare is a machine with memory and processors but without a state. It can be
// made long before it is needed.
type Spare struct{ vm *VM }

// NewSpare makes a spare. Load or Close must be called for it.
func NewSpare(cfg SpareConfig) (*Spare, error) {
	if err := validateSize(cfg.Memory, cfg.VCPUs); err != nil {
		return nil, err
	}
	if cfg.Profile == "" {
		cfg.Profile = cpu.HostV1
	}
	vm := &VM{profile: cfg.Profile, gate: newGate(), done: make(chan struct{})}
	if err := vm.create(cfg); err != nil {
		return nil, errors.Join(err, vm.free())
	}
	return &Spare{vm}, nil
}

// take moves the spare's machine to the caller.
func (s *Spare) take() *VM {
	vm := s.vm
	s.vm = nil
	return vm
}

// Close frees a spare that was not loaded.
func (s *Spare) Close() error {
	if s.vm == nil {
		return nil
	}
	return s.take().free()
}

func (vm *VM) create(cfg SpareConfig) (err error) {
	if missing := cpu.MissingCapabilities(cfg.KVM); len(missing) > 0 {
		return fmt.Errorf("this host's KVM lacks %s: a Linux kernel of version 4.19 or newer has it", strings.Join(missing, ", "))
	}
	if vm.kvm, err = cfg.KVM.CreateVM(); err != nil {
		return err
	}
	if err := vm.kvm.SetTSSAddress(tssAddr); err != nil {
		return err
	}
	if err := vm.kvm.EnableSplitIRQChip(ioapicPins); err != nil {
		return err
	}
	if vm.mem, err = guestmem.NewLayered(cfg.Memory, cfg.Layers); err != nil {
		return err
	}
	vm.mem.Populate(cfg.Written)
	if cfg.Watch != nil {
		vm.mem.Watch(cfg.Watch)
	}
	for i, r := range vm.mem.Regions() {
		if err := vm.kvm.SetMemory(uint32(i), r.GPA, r.Size(), r.HostAddr()); err != nil {
			return err
		}
	}
	if err := vm.createVCPUs(cfg); err != nil {
		return err
	}
	if cfg.KVM.CheckExtension(kvm.CapPreFaultMemory) != 0 {
		for _, s := range slices.Concat(cfg.Written, cfg.Read) {
			// PreFault only saves the guest page faults, so an error is
			// ignored.
			_ = vm.mem.EachGPA(s, vm.vcpus[0].kvm.PreFault)
		}
	}
	return nil
}

func (vm *VM) createVCPUs(cfg SpareConfig) error {
	supported, err := cfg.KVM.SupportedCPUID()
	if err != nil {
		return err
	}
	common, err := cfg.Profile.Apply(supported, cfg.KVM.CheckExtension(kvm.CapTSCDeadlineTimer) != 0)
	if err != nil {
		return err
	}
	for id := range cfg.VCPUs {
		c, err := vm.kvm.CreateVCPU(id)
		if err != nil {
			return err
		}
		v := &vcpu{id: id, vm: vm, kvm: c}
		vm.vcpus = append(vm.vcpus, v)
		if err := c.SetCPUID(cpu.ForVCPU(common, id, cfg.VCPUs)); err != nil {
			return err
		}
		if mask := cpu.XStateMask(common); mask != 0 {
			if err := c.SetXCR0(mask); err != nil {
				return err
			}
			v.xcr0 = mask
		}
	}
	return nil
}
