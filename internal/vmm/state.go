package vmm

import (
	"encoding/binary"
	"errors"
	"fmt"

	"agentrun.dev/internal/codec"
	"agentrun.dev/internal/vmm/kvm"
	"agentrun.dev/internal/vmm/virtio"
)

// State is a machine at rest, without the content of its memory and disks.
type State struct {
	Profile Profile
	Memory  uint64
	// TSCKHz is the frequency of the guest's time stamp counter.
	TSCKHz uint32
	Clock  ClockState
	VCPUs  []VCPUState
	IOAPIC IOAPICState
	Serial SerialState
	// Devices are the virtio devices in the order of their windows.
	Devices []DeviceState
	// Standby says that a copy can go on with a connection to the host.
	Standby bool
}

// ClockState is the guest's time at the moment it stopped.
type ClockState struct {
	// Nanoseconds is kvm-clock.
	Nanoseconds uint64
	// TSC is that of the first vCPU; TSCAhead is how much further each vCPU's
	// is, 0 unless the guest changed one.
	TSC      uint64
	TSCAhead [MaxVCPUs]uint64
	// Deadlines are the vCPUs' armed timers, in TSC; 0 is none.
	Deadlines [MaxVCPUs]uint64
}

// VCPUState is a processor at rest.
type VCPUState struct {
	Regs      kvm.Regs
	Sregs     kvm.Sregs
	LAPIC     kvm.LAPIC
	Events    kvm.Events
	DebugRegs kvm.DebugRegs
	MPState   kvm.MPState
	XCR0      uint64
	XSave     []byte
	MSRs      []kvm.MSREntry
}

// DeviceState is a virtio device at rest: its transport, and what only the
// device knows, encoded by itself.
type DeviceState struct {
	MMIO virtio.MMIOState
	Own  []byte
}

const (
	stateMagic   = "AGRSTATE"
	stateVersion = 2

	maxXSave    = 64 << 10
	maxMSRs     = 1024
	maxOwnState = 4 << 10
	maxName     = 64
)

// Marshal encodes a state.
func (s *State) Marshal() ([]byte, error) {
	e := codec.NewEncoder([]byte(stateMagic))
	e.Version(stateVersion)
	e.String(string(s.Profile))
	e.Uvarint(s.Memory)
	e.Uvarint(uint64(s.TSCKHz))
	var errs []error
	put := func(v any) {
		b, err := binary.Append(nil, binary.LittleEndian, v)
		errs = append(errs, err)
		e.Data(b)
	}
	put(&s.Clock)
	put(&s.IOAPIC)
	put(&s.Serial)
	e.Uvarint(uint64(len(s.VCPUs)))
	for i := range s.VCPUs {
		c := &s.VCPUs[i]
		put(&c.Regs)
		put(&c.Sregs)
		e.Data(c.LAPIC.Regs[:])
		e.Data(c.Events[:])
		e.Data(c.DebugRegs[:])
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
	for i := range s.Devices {
		put(&s.Devices[i].MMIO)
		e.Data(s.Devices[i].Own)
	}
	e.Bool(s.Standby)
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("encode the machine's state: %w", err)
	}
	return e.Bytes(), nil
}

// UnmarshalState decodes a state. It checks the form; whether the values fit a
// machine is checked where they are put into one.
func UnmarshalState(b []byte) (*State, error) {
	if len(b) < len(stateMagic) || string(b[:len(stateMagic)]) != stateMagic {
		return nil, errors.New("decode the machine's state: this is no state of a microVM")
	}
	d := codec.NewDecoder(b[len(stateMagic):])
	// A machine is restored whole or not at all: a newer state is not read in
	// part, as other messages are.
	if v := d.Uvarint(); v != stateVersion {
		d.Fail(fmt.Errorf("version %d is not supported, only %d: it was saved by another version of agentrun", v, stateVersion))
	}
	get := func(v any) {
		p := d.View(binary.Size(v))
		if d.Err() != nil {
			return
		}
		if len(p) != binary.Size(v) {
			d.Fail(fmt.Errorf("%T has %d bytes, not %d", v, len(p), binary.Size(v)))
			return
		}
		if _, err := binary.Decode(p, binary.LittleEndian, v); err != nil {
			d.Fail(err)
		}
	}
	fixed := func(dst []byte) {
		if p := d.View(len(dst)); d.Err() == nil && copy(dst, p) != len(dst) {
			d.Fail(fmt.Errorf("%d bytes where %d belong", len(p), len(dst)))
		}
	}
	s := &State{
		Profile: Profile(d.String(maxName)),
		Memory:  d.Uvarint(),
		TSCKHz:  uint32(d.UvarintMax(1<<32 - 1)),
	}
	get(&s.Clock)
	get(&s.IOAPIC)
	get(&s.Serial)
	for range d.Count(MaxVCPUs) {
		var c VCPUState
		get(&c.Regs)
		get(&c.Sregs)
		fixed(c.LAPIC.Regs[:])
		fixed(c.Events[:])
		fixed(c.DebugRegs[:])
		c.MPState = kvm.MPState(d.UvarintMax(1<<32 - 1))
		c.XCR0 = d.Uvarint()
		c.XSave = d.Data(maxXSave)
		for range d.Count(maxMSRs) {
			c.MSRs = append(c.MSRs, kvm.MSREntry{Index: uint32(d.UvarintMax(1<<32 - 1)), Data: d.Uvarint()})
		}
		s.VCPUs = append(s.VCPUs, c)
	}
	for range d.Count(maxVirtio) {
		var v DeviceState
		get(&v.MMIO)
		v.Own = d.Data(maxOwnState)
		s.Devices = append(s.Devices, v)
	}
	s.Standby = d.Bool()
	if err := d.Finish(); err != nil {
		return nil, fmt.Errorf("decode the machine's state: %w", err)
	}
	return s, nil
}
