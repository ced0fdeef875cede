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

// stopClock remembers the guest's time. For a pause, a fork and a hibernation
// the same rule holds: the monotonic clocks of a guest do not advance while it
// stands still.
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
			// Linux before 5.16 does not tell: assume that the guest has not
			// changed it.
			offset = first
		}
		if i == 0 {
			first = offset
			if s.TSC, err = v.kvm.MSR(msrTSC); err != nil {
				return err
			}
		}
		s.TSCAhead[i] = offset - first
		// A vCPU without the deadline timer cannot have armed it.
		if s.Deadlines[i], err = v.kvm.MSR(msrTSCDeadline); err != nil {
			s.Deadlines[i] = 0
		}
	}
	vm.stopped = s
	return nil
}

// usesClock reports whether a guest with these registers uses kvm-clock. Such a
// guest is told that it stood still.
func usesClock(msrs []kvm.MSREntry) bool {
	return slices.ContainsFunc(msrs, func(m kvm.MSREntry) bool {
		return (m.Index == msrKVMSystemTime || m.Index == msrKVMSystemTimeNew) && m.Data&1 != 0
	})
}

// startClock continues the guest's time from where it stopped.
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
			// This is less exact, but KVM treats writes of nearly the same
			// value on all vCPUs as an attempt to synchronise them.
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
		v.clockless = false // from now on it may begin to use kvm-clock
	}
	vm.stopped = nil
	return nil
}
