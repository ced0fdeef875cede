package vmm

import (
	"fmt"

	"agentrun.dev/internal/kvm"
	"agentrun.dev/internal/virtio"
)

// createDevices makes the interrupt controller, the console and the virtio
// devices. Disks come first, then networks, so that their order in the guest
// is the caller's.
func (vm *VM) createDevices(cfg Config) error {
	vm.ioapic = newIOAPIC(func(m kvm.MSI) error { return vm.kvm.SignalMSI(m) })
	vm.serial = newSerial(&vm.console, func() error { return vm.ioapic.raise(serialGSI) })
	vm.ports.serial, vm.ports.marker = vm.serial, cfg.Marker
	vm.windows.ioapic = vm.ioapic

	for i, d := range cfg.Disks {
		disk, err := virtio.OpenFileDisk(d.File, d.ReadOnly)
		if err != nil {
			return fmt.Errorf("disk %d: %w", i, err)
		}
		vm.attach(virtio.NewBlock(virtio.BlockConfig{Disk: disk, ID: d.ID}))
	}
	for i, n := range cfg.Nets {
		card, err := virtio.NewNet(virtio.NetConfig{MAC: n.MAC, MTU: n.MTU, Socket: n.Socket})
		if err != nil {
			return fmt.Errorf("network %d: %w", i, err)
		}
		vm.attach(card)
	}
	if cfg.Vsock != nil {
		vm.vsock = virtio.NewVsock(virtio.VsockConfig{Accept: cfg.Vsock.Accept})
		vm.attach(vm.vsock)
	}
	vm.balloon = virtio.NewBalloon()
	vm.attach(virtio.NewRNG())
	vm.attach(vm.balloon)
	return nil
}

// attach gives a device the next window and interrupt line.
func (vm *VM) attach(d virtio.Device) {
	gsi := firstVirtioGSI + uint32(len(vm.windows.virtio))
	m := virtio.NewMMIO(vm.mem, d, func() {
		if err := vm.ioapic.raise(gsi); err != nil {
			vm.end(Exit{ReasonInternalError, fmt.Sprintf("raise interrupt %d: %v", gsi, err)})
		}
	})
	vm.windows.virtio = append(vm.windows.virtio, m)
}
