package vmm

import (
	"encoding/binary"
	"errors"
	"fmt"

	"agentrun.dev/internal/vmm/cpu"
	"agentrun.dev/internal/vmm/kvm"
	"agentrun.dev/internal/vmm/virtio"
	"agentrun.dev/internal/vmm/vmstate"
)

// State is the state of a paused machine, without the content of its memory and
// disks.
type State struct {
	Profile cpu.Profile
	Memory  uint64
	// TSCKHz is the frequency of the guest's time stamp counter.
	TSCKHz uint32
	Clock  ClockState
	VCPUs  []VCPUState
	IOAPIC IOAPICState
	Serial SerialState
	// Devices holds the virtio devices in the order of their windows.
	Devices []DeviceState
	// Standby says that a copy can continue a connection to the host.
	Standby bool
}

// ClockState is the guest's time at the moment it stopped.
type ClockState struct {
	// Nanoseconds is kvm-clock.
	Nanoseconds uint64
	// TSC is the counter of the first vCPU. TSCAhead is how far each vCPU's
	// counter is ahead of it: 0 unless the guest changed one.
	TSC      uint64
	TSCAhead [cpu.MaxVCPUs]uint64
	// Deadlines are the vCPUs' armed timers, as TSC values; 0 is a timer that
	// is not armed.
	Deadlines [cpu.MaxVCPUs]uint64
}

// VCPUState is the state of a paused processor.
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

// DeviceState is the state of a paused virtio device: its transport, and the
// state specific to the device, which the device encodes itself.
type DeviceState struct {
	MMIO virtio.MMIOState
	Own  []byte
}

// Marshal encodes a state.
func (s *State) Marshal() ([]byte, error) {
	var errs []error
	part := func(v any) []byte {
		b, err := binary.Append(nil, binary.LittleEndian, v)
		errs = append(errs, err)
		return b
	}
	out := vmstate.State{
		Profile: s.Profile, Memory: s.Memory, TSCKHz: s.TSCKHz, Standby: s.Standby,
		Clock: part(&s.Clock), IOAPIC: part(&s.IOAPIC), Serial: part(&s.Serial),
	}
	for i := range s.VCPUs {
		c := &s.VCPUs[i]
		v := vmstate.VCPU{
			Regs: part(&c.Regs), Sregs: part(&c.Sregs), LAPIC: c.LAPIC.Regs[:], Events: c.Events[:], DebugRegs: c.DebugRegs[:],
			MPState: uint32(c.MPState), XCR0: c.XCR0, XSave: c.XSave,
		}
		for _, m := range c.MSRs {
			v.MSRs = append(v.MSRs, vmstate.MSR{Index: m.Index, Data: m.Data})
		}
		out.VCPUs = append(out.VCPUs, v)
	}
	for i := range s.Devices {
		out.Devices = append(out.Devices, vmstate.Device{MMIO: part(&s.Devices[i].MMIO), Own: s.Devices[i].Own})
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("encode the machine's state: %w", err)
	}
	return out.Marshal(), nil
}

// UnmarshalState decodes a state, which aliases b. It checks only the form; Load
// checks whether the values fit the machine.
func UnmarshalState(b []byte) (*State, error) {
	in, err := vmstate.Unmarshal(b)
	if err != nil {
		return nil, err
	}
	var errs []error
	get := func(part []byte, v any) {
		_, err := binary.Decode(part, binary.LittleEndian, v)
		errs = append(errs, err)
	}
	s := &State{Profile: in.Profile, Memory: in.Memory, TSCKHz: in.TSCKHz, Standby: in.Standby}
	get(in.Clock, &s.Clock)
	get(in.IOAPIC, &s.IOAPIC)
	get(in.Serial, &s.Serial)
	for i := range in.VCPUs {
		v := &in.VCPUs[i]
		c := VCPUState{MPState: kvm.MPState(v.MPState), XCR0: v.XCR0, XSave: v.XSave}
		get(v.Regs, &c.Regs)
		get(v.Sregs, &c.Sregs)
		copy(c.LAPIC.Regs[:], v.LAPIC)
		copy(c.Events[:], v.Events)
		copy(c.DebugRegs[:], v.DebugRegs)
		for _, m := range v.MSRs {
			c.MSRs = append(c.MSRs, kvm.MSREntry{Index: m.Index, Data: m.Data})
		}
		s.VCPUs = append(s.VCPUs, c)
	}
	for _, d := range in.Devices {
		v := DeviceState{Own: d.Own}
		get(d.MMIO, &v.MMIO)
		s.Devices = append(s.Devices, v)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("decode the machine's state: %w", err)
	}
	return s, nil
}
