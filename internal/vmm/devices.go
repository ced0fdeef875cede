package vmm

import (
	"encoding/binary"
	"fmt"

	"agentrun.dev/internal/vmm/kvm"
	"agentrun.dev/internal/vmm/virtio"
	"agentrun.dev/internal/vmm/vmstate"
)

// device is a virtio device behind its transport.
type device struct {
	*virtio.MMIO
	// save encodes the state that is specific to the device.
	save func() ([]byte, error)
}

// stateful is a virtio device whose own state is a fixed-size S.
type stateful[S any] interface {
	virtio.Device
	Save() S
	Restore(S) error
}

// createDevices makes the interrupt controller, the console and the virtio
// devices. Disks come first, then networks, so that their order in the guest is
// the caller's. If state is not nil, the devices start paused, in that state.
func (vm *VM) createDevices(d Devices, state *State) error {
	vm.devices = d
	vm.ioapic = newIOAPIC(func(m kvm.MSI) error { return vm.kvm.SignalMSI(m) })
	vm.serial = newSerial(&vm.console, func() error { return vm.ioapic.raise(serialGSI) })
	vm.ports.serial, vm.ports.marker = vm.serial, d.Marker
	vm.windows.ioapic = vm.ioapic
	if state != nil {
		if len(state.Devices) != d.count() {
			return fmt.Errorf("the state has %d virtio devices, this machine has %d", len(state.Devices), d.count())
		}
		vm.ioapic.restore(state.IOAPIC)
		vm.serial.restore(state.Serial)
	}

	for i, disk := range d.Disks {
		if err := attach(vm, virtio.NewBlock(virtio.BlockConfig{Disk: disk.Backend, ID: disk.ID, Rate: disk.Rate}), state); err != nil {
			return fmt.Errorf("disk %d: %w", i, err)
		}
	}
	for i, n := range d.Nets {
		card, err := virtio.NewNet(virtio.NetConfig{MAC: n.MAC, MTU: n.MTU, Socket: n.Socket})
		if err == nil {
			vm.nets = append(vm.nets, card)
			err = attach(vm, card, state)
		}
		if err != nil {
			return fmt.Errorf("network %d: %w", i, err)
		}
	}
	if d.Vsock != nil {
		vm.vsock = virtio.NewVsock(virtio.VsockConfig{Accept: d.Vsock.Accept})
		if err := attach(vm, vm.vsock, state); err != nil {
			return err
		}
	}
	vm.rng, vm.balloon = virtio.NewRNG(), virtio.NewBalloon()
	if err := attach(vm, vm.rng, state); err != nil {
		return err
	}
	return attach(vm, vm.balloon, state)
}

// attach gives a device the next window and interrupt line, and its state if
// state is not nil.
func attach[S any](vm *VM, d stateful[S], state *State) error {
	i := len(vm.windows.virtio)
	gsi := firstVirtioGSI + uint32(i)
	if state != nil {
		var own S
		if n, err := binary.Decode(state.Devices[i].Own, binary.LittleEndian, &own); err != nil || n != len(state.Devices[i].Own) {
			return fmt.Errorf("state of virtio device %d has %d bytes, not %d", i, len(state.Devices[i].Own), binary.Size(&own))
		}
		if err := d.Restore(own); err != nil {
			return err
		}
	}
	m := virtio.NewMMIO(vm.mem, d, func() {
		if err := vm.ioapic.raise(gsi); err != nil {
			vm.end(vmstate.Exit{Reason: vmstate.InternalError, Detail: fmt.Sprintf("raise interrupt %d: %v", gsi, err)})
		}
	})
	vm.windows.virtio = append(vm.windows.virtio, device{m, func() ([]byte, error) {
		own := d.Save()
		return binary.Append(nil, binary.LittleEndian, &own)
	}})
	if state != nil {
		return m.Restore(state.Devices[i].MMIO)
	}
	return nil
}
