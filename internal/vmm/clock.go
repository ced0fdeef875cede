package vmm

import (
	"errors"
	"slices"

	"agentrun.dev/internal/vmm/kvm"
	"golang.org/x/sys/unix"
)

const (
	msrTSC         = 0x10
	msrTSCDeadline = 0x6e0

	msrKVMSystemTime    = 0x12
	msrKVMSystemTimeNew = 0x4b564d01

	msrKVMWallClock    = 0x11
	msrKVMWallClockNew = 0x4b564d00
)

// stopClock remembers the guest's time. One rule holds for a pause, a fork and
// a hibernation: the time for which a guest stands still does not exist for
// its monotonic clocks.
func (vm *VM) stopClock() error {
	c, err := vm.kvm.Clock()
	if err != nil {
		return err
	}
	s := &ClockState{Nanoseconds: c.Clock}
	var first uint64
	for i, v := range vm.vcpus {
		offset, err := v.kvm.TSCOffset()
		if err != nil {
			// Before Linux 5.16 nobody can know: the guest has not changed it.
			offset = first
		}
		if i == 0 {
			first = offset
			if s.TSC, err = v.kvm.MSR(msrTSC); err != nil {
				return err
			}
		}
		s.TSCAhead[i] = offset - first
		// A vCPU without the deadline timer has none armed.
		if s.Deadlines[i], err = v.kvm.MSR(msrTSCDeadline); err != nil {
			s.Deadlines[i] = 0
		}
	}
	vm.stopped = s
	return nil
}

// usesClock reports whether a guest with these registers has kvm-clock, which is
// told that the guest stood still.
func usesClock(msrs []kvm.MSREntry) bool {
	return slices.ContainsFunc(msrs, func(m kvm.MSREntry) bool {
		return (m.Index == msrKVMSystemTime || m.Index == msrKVMSystemTimeNew) && m.Data&1 != 0
	})
}

// startClock lets the guest's time go on from where it stopped.
func (vm *VM) startClock() error {
	s := vm.stopped
	if s == nil {
		return nil
	}
	now := kvm.HostTSC()
	for i, v := range vm.vcpus {
		tsc := s.TSC + s.TSCAhead[i]
		err := v.kvm.SetTSCOffset(tsc - now)
		if errors.Is(err, unix.ENXIO) {
			// Less exact, but KVM takes writes of nearly the same value on
			// all vCPUs for an attempt to synchronise them.
			err = v.kvm.SetMSRs([]kvm.MSREntry{{Index: msrTSC, Data: tsc}})
		}
		if err != nil {
			return err
		}
	}
	if err := vm.kvm.SetClock(kvm.Clock{Clock: s.Nanoseconds}); err != nil {
		return err
	}
	for i, v := range vm.vcpus {
		if s.Deadlines[i] != 0 {
			if err := v.kvm.SetMSRs([]kvm.MSREntry{{Index: msrTSCDeadline, Data: s.Deadlines[i]}}); err != nil {
				return err
			}
		}
		if !v.clockless {
			if err := v.kvm.ClockStopped(); err != nil {
				return err
			}
		}
		v.clockless = false // it may begin to use one
	}
	vm.stopped = nil
	return nil
}
