package vmstate

import (
	"errors"
	"fmt"

	"agentrun.dev/internal/codec"
	"agentrun.dev/internal/vmm/cpu"
)

// State is the stored form of a paused machine, without the content of its memory
// and disks. The first fields are for the process that keeps the snapshot; the
// others are parts that only a vmm makes and understands.
type State struct {
	Profile cpu.Profile
	Memory  uint64
	// TSCKHz is the frequency of the guest's time stamp counter.
	TSCKHz uint32
	// Standby says that a copy can continue a connection to the host.
	Standby bool

	Clock, IOAPIC, Serial []byte
	VCPUs                 []VCPU
	// Devices holds the virtio devices in the order of their windows.
	Devices []Device
}

// VCPU is a paused processor.
type VCPU struct {
	Regs, Sregs, LAPIC, Events, DebugRegs []byte
	MPState                               uint32
	XCR0                                  uint64
	XSave                                 []byte
	MSRs                                  []MSR
}

// MSR is a model-specific register.
type MSR struct {
	Index uint32
	Data  uint64
}

// Device is a paused virtio device: its transport and the state specific to the
// device.
type Device struct{ MMIO, Own []byte }

// The sizes of the parts. The vmm encodes the parts; its tests compare these
// sizes.
const (
	SizeClock     = 16 + 2*8*cpu.MaxVCPUs
	SizeIOAPIC    = 200
	SizeSerial    = 7
	SizeRegs      = 144
	SizeSregs     = 312
	SizeLAPIC     = 1024
	SizeEvents    = 64
	SizeDebugRegs = 128
	SizeMMIO      = 164
)

// MaxDevices is the largest number of virtio devices of a machine.
const MaxDevices = 14

const (
	magic   = "AGRSTATE"
	version = 2

	maxXSave = 64 << 10
	maxMSRs  = 1024
	maxOwn   = 4 << 10
	maxName  = 64
)

// Marshal encodes a state.
func (s *State) Marshal() []byte {
	e := codec.NewEncoder([]byte(magic))
	e.Version(version)
	e.String(string(s.Profile))
	e.Uvarint(s.Memory)
	e.Uvarint(uint64(s.TSCKHz))
	e.Data(s.Clock)
	e.Data(s.IOAPIC)
	e.Data(s.Serial)
	e.Uvarint(uint64(len(s.VCPUs)))
	for i := range s.VCPUs {
		c := &s.VCPUs[i]
		for _, part := range [][]byte{c.Regs, c.Sregs, c.LAPIC, c.Events, c.DebugRegs} {
			e.Data(part)
		}
		e.Uvarint(uint64(c.MPState))
		e.Uvarint(c.XCR0)
		e.Data(c.XSave)
		e.Uvarint(uint64(len(c.MSRs)))
		for _, m := range c.MSRs {
			e.Uvarint(uint64(m.Index))
			e.Uvarint(m.Data)
		}
	}
	e.Uvarint(uint64(len(s.Devices)))
	for _, d := range s.Devices {
		e.Data(d.MMIO)
		e.Data(d.Own)
	}
	e.Bool(s.Standby)
	return e.Bytes()
}

// Unmarshal decodes a state; its parts alias b. It checks only the form; the vmm
// checks whether the values fit the machine.
func Unmarshal(b []byte) (*State, error) {
	if len(b) < len(magic) || string(b[:len(magic)]) != magic {
		return nil, errors.New("decode the machine's state: this is no state of a microVM")
	}
	d := codec.NewDecoder(b[len(magic):])
	// A machine is restored completely or not at all: unlike other messages, a
	// newer state is never read in part.
	if v := d.Uvarint(); v != version {
		d.Fail(fmt.Errorf("version %d is not supported, only %d: it was saved by another version of agentrun", v, version))
	}
	part := func(size int) []byte {
		p := d.View(size)
		if d.Err() == nil && len(p) != size {
			d.Fail(fmt.Errorf("%d bytes where %d belong", len(p), size))
		}
		return p
	}
	s := &State{
		Profile: cpu.Profile(d.String(maxName)),
		Memory:  d.Uvarint(),
		TSCKHz:  uint32(d.UvarintMax(1<<32 - 1)),
		Clock:   part(SizeClock), IOAPIC: part(SizeIOAPIC), Serial: part(SizeSerial),
	}
	for range d.Count(cpu.MaxVCPUs) {
		c := VCPU{
			Regs: part(SizeRegs), Sregs: part(SizeSregs), LAPIC: part(SizeLAPIC), Events: part(SizeEvents), DebugRegs: part(SizeDebugRegs),
			MPState: uint32(d.UvarintMax(1<<32 - 1)), XCR0: d.Uvarint(), XSave: d.View(maxXSave),
		}
		for range d.Count(maxMSRs) {
			c.MSRs = append(c.MSRs, MSR{Index: uint32(d.UvarintMax(1<<32 - 1)), Data: d.Uvarint()})
		}
		s.VCPUs = append(s.VCPUs, c)
	}
	for range d.Count(MaxDevices) {
		s.Devices = append(s.Devices, Device{MMIO: part(SizeMMIO), Own: d.View(maxOwn)})
	}
	s.Standby = d.Bool()
	if err := d.Finish(); err != nil {
		return nil, fmt.Errorf("decode the machine's state: %w", err)
	}
	return s, nil
}
