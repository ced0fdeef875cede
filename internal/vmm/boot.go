package vmm

import (
	"errors"
	"fmt"

	"agentrun.dev/internal/guestmem"
	"agentrun.dev/internal/kvm"
	"agentrun.dev/internal/vmm/acpi"
)

// requiredCapabilities is what a host's KVM must offer.
var requiredCapabilities = []struct {
	cap  kvm.Capability
	name string
}{
	{kvm.CapUserMemory, "user memory"},
	{kvm.CapExtCPUID, "extended CPUID"},
	{kvm.CapXCRS, "extended control registers"},
	{kvm.CapMPState, "MP state"},
	{kvm.CapSignalMSI, "MSI injection"},
	{kvm.CapSplitIRQChip, "split irqchip"},
	{kvm.CapImmediateExit, "immediate exit"},
}

// Boot makes a machine with its kernel loaded. It does not run yet: Start
// does that.
func Boot(cfg Config) (*VM, error) {
	if err := cfg.validate(); err != nil {
		return nil, errors.Join(fmt.Errorf("boot: %w", err), cfg.closeFiles())
	}
	vm := &VM{cfg: cfg, gate: newGate(), done: make(chan struct{})}
	if err := vm.boot(cfg); err != nil {
		return nil, errors.Join(fmt.Errorf("boot: %w", err), vm.free(), cfg.closeFiles())
	}
	return vm, nil
}

func (vm *VM) boot(cfg Config) error {
	for _, c := range requiredCapabilities {
		if cfg.KVM.CheckExtension(c.cap) == 0 {
			return fmt.Errorf("this host's KVM lacks %s: a Linux kernel of version 4.19 or newer has it", c.name)
		}
	}
	if err := vm.createMachine(cfg); err != nil {
		return err
	}
	if err := vm.createVCPUs(cfg); err != nil {
		return err
	}
	if err := vm.createDevices(cfg); err != nil {
		return err
	}
	if err := vm.writeTables(cfg.VCPUs); err != nil {
		return err
	}
	entry, end, err := loadKernel(vm.mem, cfg.Kernel)
	if err != nil {
		return err
	}
	info := bootInfo{cmdline: cfg.Cmdline}
	if cfg.Initrd != nil {
		if info.initrdAddr, info.initrdSize, err = loadInitrd(vm.mem, cfg.Initrd, end); err != nil {
			return err
		}
	}
	if err := writeBootData(vm.mem, info); err != nil {
		return err
	}
	return enterLongMode(vm.vcpus[0].kvm, entry)
}

// createMachine makes the VM, its interrupt controllers and its memory.
func (vm *VM) createMachine(cfg Config) (err error) {
	if vm.kvm, err = cfg.KVM.CreateVM(); err != nil {
		return err
	}
	if err := vm.kvm.SetTSSAddress(tssAddr); err != nil {
		return err
	}
	if err := vm.kvm.EnableSplitIRQChip(ioapicPins); err != nil {
		return err
	}
	if vm.mem, err = guestmem.NewAnonymous(cfg.Memory); err != nil {
		return err
	}
	for i, r := range vm.mem.Regions() {
		if err := vm.kvm.SetMemory(uint32(i), r.GPA, r.Size(), r.HostAddr()); err != nil {
			return err
		}
	}
	return nil
}

func (vm *VM) createVCPUs(cfg Config) error {
	supported, err := cfg.KVM.SupportedCPUID()
	if err != nil {
		return err
	}
	profile := cfg.Profile
	if profile == "" {
		profile = ProfileHostV1
	}
	common, err := profile.apply(supported, cfg.KVM.CheckExtension(kvm.CapTSCDeadlineTimer) != 0)
	if err != nil {
		return err
	}
	for id := range cfg.VCPUs {
		c, err := vm.kvm.CreateVCPU(id)
		if err != nil {
			return err
		}
		vm.vcpus = append(vm.vcpus, &vcpu{id: id, vm: vm, kvm: c})
		if err := c.SetCPUID(forVCPU(common, id, cfg.VCPUs)); err != nil {
			return err
		}
		if err := c.SetMSRs(bootMSRs); err != nil {
			return err
		}
		if mask := xstateMask(common); mask != 0 {
			if err := c.SetXCR0(mask); err != nil {
				return err
			}
		}
	}
	return nil
}

// bootMSRs is what firmware would have set on each processor.
var bootMSRs = []kvm.MSREntry{
	{Index: msrMTRRDefType, Data: mtrrEnable | mtrrWriteBack},
}

const (
	msrMTRRDefType = 0x2ff
	// Linux leaves page attributes alone where the MTRRs are off.
	mtrrEnable    = 1 << 11
	mtrrWriteBack = 6
)

// writeTables writes the firmware tables and a first generation id.
func (vm *VM) writeTables(vcpus int) error {
	m := acpi.Machine{
		VCPUs:          vcpus,
		SerialPort:     serialPort,
		SerialGSI:      serialGSI,
		GenerationAddr: generationAddr,
		EventGSI:       eventGSI,
	}
	for i := range vm.windows.virtio {
		m.Virtio = append(m.Virtio, acpi.VirtioDevice{
			Base: virtioBase + uint32(i)*virtioWindow,
			Size: virtioWindow,
			GSI:  firstVirtioGSI + uint32(i),
		})
	}
	tables, err := m.Tables(acpiAddr, acpiLimit)
	if err != nil {
		return err
	}
	if err := vm.mem.Write(acpiAddr, tables); err != nil {
		return fmt.Errorf("write ACPI tables: %w", err)
	}
	return vm.writeGeneration()
}
