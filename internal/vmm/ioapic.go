package vmm

import (
	"encoding/binary"
	"sync"

	"agentrun.dev/internal/vmm/kvm"
)

const ioapicPins = 24

// IOAPICState is the complete state of an ioapic.
type IOAPICState struct {
	Select      uint32
	Redirection [ioapicPins]uint64
	// Pending has a bit for each pin that was raised while masked.
	Pending uint32
}

// ioapic is the I/O interrupt controller in user space (Intel 82093AA). With
// KVM's split irqchip the LAPICs are in the kernel; the ioapic turns a device's
// line into a message to them.
//
// All lines of this machine are edge-triggered. If a guest programs a pin as
// level-triggered, it still gets every edge. A virtio device keeps its reasons
// in a status register until they are acknowledged, and raises the line again
// for each new reason. So no interrupt is lost without end-of-interrupt
// messages.
type ioapic struct {
	signal func(kvm.MSI) error

	mu    sync.Mutex // protects state
	state IOAPICState
}

const (
	ioapicRegSelect = 0x00
	ioapicRegWindow = 0x10

	ioapicID      = 0x00
	ioapicVersion = 0x01
	ioapicArb     = 0x02
	ioapicTable   = 0x10

	redirMasked        = 1 << 16
	redirReadOnly      = 1<<12 | 1<<14 // delivery status, remote IRR
	redirDestModeShift = 11
	redirDestShift     = 56
)

func newIOAPIC(signal func(kvm.MSI) error) *ioapic {
	a := &ioapic{signal: signal}
	for i := range a.state.Redirection {
		a.state.Redirection[i] = redirMasked
	}
	return a
}

// raise delivers one edge on a pin, or remembers it while the pin is masked.
func (a *ioapic) raise(pin uint32) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.deliver(pin)
}

// deliver delivers an edge; the caller holds a.mu.
func (a *ioapic) deliver(pin uint32) error {
	r := a.state.Redirection[pin]
	if r&redirMasked != 0 {
		a.state.Pending |= 1 << pin
		return nil
	}
	a.state.Pending &^= 1 << pin
	return a.signal(kvm.MSI{
		// Intel SDM vol. 3 §11.11: destination in bits 12–19, destination
		// mode in bit 2; without the mode, logical destinations get lost.
		AddressLo: 0xfee0_0000 | uint32(r>>redirDestShift)<<12 | uint32(r>>redirDestModeShift&1)<<2,
		// Vector and delivery mode; trigger mode stays edge.
		Data: uint32(r & 0x7ff),
	})
}

func (a *ioapic) read(off uint64, data []byte) {
	var v uint32
	a.mu.Lock()
	switch off {
	case ioapicRegSelect:
		v = a.state.Select
	case ioapicRegWindow:
		v = a.readRegister()
	}
	a.mu.Unlock()
	putLittleEndian(data, uint64(v))
}

func (a *ioapic) readRegister() uint32 {
	switch sel := a.state.Select; {
	case sel == ioapicID, sel == ioapicArb:
		return 0
	case sel == ioapicVersion:
		return 0x11 | (ioapicPins-1)<<16
	case sel >= ioapicTable && sel < ioapicTable+2*ioapicPins:
		r := a.state.Redirection[(sel-ioapicTable)/2]
		if sel&1 == 1 {
			return uint32(r >> 32)
		}
		return uint32(r)
	}
	return 0
}

func (a *ioapic) write(off uint64, data []byte) error {
	if len(data) != 4 {
		return nil // only 32-bit accesses are defined
	}
	v := binary.LittleEndian.Uint32(data)
	a.mu.Lock()
	defer a.mu.Unlock()
	switch off {
	case ioapicRegSelect:
		a.state.Select = v & 0xff
	case ioapicRegWindow:
		return a.writeRegister(v)
	}
	return nil
}

func (a *ioapic) writeRegister(v uint32) error {
	sel := a.state.Select
	if sel < ioapicTable || sel >= ioapicTable+2*ioapicPins {
		return nil
	}
	pin := (sel - ioapicTable) / 2
	r := &a.state.Redirection[pin]
	if sel&1 == 1 {
		*r = *r&0xffff_ffff | uint64(v)<<32
	} else {
		*r = *r&^0xffff_ffff | uint64(v)&^redirReadOnly
	}
	if a.state.Pending&(1<<pin) != 0 && *r&redirMasked == 0 {
		return a.deliver(pin)
	}
	return nil
}

// save returns the controller's state.
func (a *ioapic) save() IOAPICState {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.state
}

// restore sets a saved state.
func (a *ioapic) restore(s IOAPICState) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.state = s
}

// putLittleEndian fills data with the low bytes of v.
func putLittleEndian(data []byte, v uint64) {
	for i := range data {
		data[i] = byte(v >> (8 * i))
	}
}
