package vmm

import (
	"sync/atomic"

	"agentrun.dev/internal/vmm/acpi"
	"agentrun.dev/internal/vmm/kvm"
	"agentrun.dev/internal/vmm/vmstate"
)

// windows dispatches memory accesses outside RAM.
type windows struct {
	ioapic *ioapic
	virtio []device
}

// ioapicWindow is the size of the IOAPIC's register window.
const ioapicWindow = 0x20

func (w *windows) access(x kvm.MMIOExit) error {
	if i := (x.Addr - virtioBase) / virtioWindow; x.Addr >= virtioBase && i < uint64(len(w.virtio)) {
		if off := x.Addr % virtioWindow; x.Write {
			w.virtio[i].Write(off, x.Data)
		} else {
			w.virtio[i].Read(off, x.Data)
		}
		return nil
	}
	if off := x.Addr - acpi.IOAPICBase; x.Addr >= acpi.IOAPICBase && off < ioapicWindow {
		if x.Write {
			return w.ioapic.write(off, x.Data)
		}
		w.ioapic.read(off, x.Data)
		return nil
	}
	if !x.Write {
		fill(x.Data, 0xff) // no device answers: the bus floats high
	}
	return nil
}

func fill(data []byte, v byte) {
	for i := range data {
		data[i] = v
	}
}

// Marker serves the ports of the bare test guest.
type Marker interface {
	// Out receives a value that the guest wrote to MarkerOut.
	Out(value uint32)
	// In returns the value that the guest reads from MarkerCommand or
	// MarkerArgument.
	In(port uint16) uint32
}

// Ports of the bare test guest (guest/testguest).
const (
	MarkerOut      = 0x510
	MarkerCommand  = 0x514
	MarkerArgument = 0x518
)

// Legacy ports that some kernels access although the tables do not name them.
const (
	keyboardPort  = 0x64 // command port of the keyboard controller
	keyboardReset = 0xfe
	cmosData      = 0x71
)

// panicEvent is PVPANIC_PANICKED (linux/uapi/misc/pvpanic.h).
const panicEvent = 1 << 0

// ports dispatches port accesses.
type ports struct {
	serial *serial
	marker Marker // may be nil
	// panicked is set when the guest's kernel reports its panic; the reset that
	// follows then counts as the panic.
	panicked atomic.Bool
}

func (p *ports) access(x kvm.IOExit) (vmstate.Exit, bool) {
	for d := x.Data; len(d) > 0; d = d[x.Size:] {
		if x.Write {
			if exit, ended := p.out(x.Port, d[:x.Size]); ended {
				return exit, true
			}
		} else {
			p.in(x.Port, d[:x.Size])
		}
	}
	return vmstate.Exit{}, false
}

func (p *ports) out(port uint16, data []byte) (vmstate.Exit, bool) {
	switch {
	case port >= serialPort && port < serialPort+serialPorts:
		if err := p.serial.write(port-serialPort, data); err != nil {
			return vmstate.Exit{Reason: vmstate.InternalError, Detail: err.Error()}, true
		}
	case port == acpi.PanicPort && data[0]&panicEvent != 0:
		p.panicked.Store(true)
	case port == acpi.SleepControlPort && data[0] == acpi.PowerOff:
		return vmstate.Exit{Reason: vmstate.PowerOff}, true
	case port == acpi.ResetPort && data[0] == acpi.ResetValue,
		port == keyboardPort && data[0] == keyboardReset:
		if p.panicked.Load() {
			return vmstate.Exit{Reason: vmstate.Panic}, true
		}
		return vmstate.Exit{Reason: vmstate.Reset}, true
	case port == MarkerOut && p.marker != nil && len(data) == 4:
		p.marker.Out(uint32(data[0]) | uint32(data[1])<<8 | uint32(data[2])<<16 | uint32(data[3])<<24)
	}
	return vmstate.Exit{}, false
}

func (p *ports) in(port uint16, data []byte) {
	switch {
	case port >= serialPort && port < serialPort+serialPorts:
		p.serial.read(port-serialPort, data)
	case port == acpi.SleepStatusPort, port == keyboardPort:
		fill(data, 0) // not asleep; the controller accepts commands
	case port == acpi.PanicPort:
		putLittleEndian(data, panicEvent) // the events that this device accepts
	case port == cmosData:
		// Zero: the clock is never "being updated". All ones would make a
		// kernel without tables wait forever for the end of an update.
		fill(data, 0)
	case (port == MarkerCommand || port == MarkerArgument) && p.marker != nil:
		putLittleEndian(data, uint64(p.marker.In(port)))
	default:
		fill(data, 0xff)
	}
}
