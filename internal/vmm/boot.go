package vmm

import (
	"errors"
	"fmt"

	"agentrun.dev/internal/vmm/acpi"
	"agentrun.dev/internal/vmm/kvm"
)

// Boot makes a machine with its kernel loaded. Start runs it.
func Boot(cfg Config) (*VM, error) {
	if err := cfg.validate(); err != nil {
		return nil, errors.Join(fmt.Errorf("boot: %w", err), cfg.close())
	}
	s, err := NewSpare(SpareConfig{KVM: cfg.KVM, Memory: cfg.Memory, VCPUs: cfg.VCPUs, Profile: cfg.Profile})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("boot: %w", err), cfg.close())
	}
	vm := s.take()
	if err := vm.boot(cfg); err != nil {
		return nil, errors.Join(fmt.Errorf("boot: %w", err), vm.free(), cfg.close())
	}
	return vm, nil
}

func (vm *VM) boot(cfg Config) error {
	for _, c := range vm.vcpus {
		if err := c.kvm.SetMSRs(bootMSRs); err != nil {
			return err
		}
	}
	if err := vm.createDevices(cfg.Devices, nil); err != nil {
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

// bootMSRs are the registers that firmware would have set on each processor.
var bootMSRs = []kvm.MSREntry{
	{Index: msrMTRRDefType, Data: mtrrEnable | mtrrWriteBack},
}

const (
	msrMTRRDefType = 0x2ff
	// Linux ignores page attributes if the MTRRs are off.
	mtrrEnable    = 1 << 11
	mtrrWriteBack = 6
)

// writeTables writes the firmware tables and a first generation id.
func (vm *VM) writeTables(vcpus int) error {
	hw := acpi.Hardware{
		VCPUs:            vcpus,
		SerialPort:       serialPort,
		SerialGSI:        serialGSI,
		GenerationIDAddr: generationIDAddr,
		EventGSI:         eventGSI,
	}
	for i := range vm.windows.virtio {
		hw.Virtio = append(hw.Virtio, acpi.VirtioDevice{
			Base: virtioBase + uint32(i)*virtioWindow,
			Size: virtioWindow,
			GSI:  firstVirtioGSI + uint32(i),
		})
	}
	tables, err := hw.Tables(acpiAddr, acpiLimit)
	if err != nil {
		return err
	}
	if err := vm.mem.Write(acpiAddr, tables); err != nil {
		return fmt.Errorf("write ACPI tables: %w", err)
	}
	return vm.writeGenerationID()
}
