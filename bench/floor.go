package bench

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"agentrun.dev/internal/vmm/kvm"
	"golang.org/x/sys/unix"
)

// floorMemory is the RAM of the floor's machine.
const floorMemory = 256 << 20

// floorCode is the code of the floor's machine, in real mode: one port write.
var floorCode = []byte{
	0xe6, 0x10, // out %al, $0x10
	0xf4, // hlt
}

const floorEntry = 0x1000

// floorHere measures the least cost of starting a machine on this host, in this
// process: KVM_CREATE_VM, split irqchip, a private mapping of 256 MiB, one slot, one
// vCPU, its registers, and a run to the first port write. Nothing else.
type floorHere struct {
	sys    *kvm.System
	memory int // memfd with the code; every machine maps it privately
	undo   []func() error
}

// newFloorHere prepares the memory that all machines of the floor share.
func newFloorHere() (*floorHere, error) {
	sys, err := kvm.Open()
	if err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("floor", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("prepare the floor: %w", err), sys.Close())
	}
	f := &floorHere{sys: sys, memory: fd}
	err = unix.Ftruncate(fd, floorMemory)
	if err == nil {
		_, err = unix.Pwrite(fd, floorCode, floorEntry)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("prepare the floor: %w", err), f.Close())
	}
	return f, nil
}

// Close frees all machines and the memory that they share.
func (f *floorHere) Close() error {
	return errors.Join(f.clear(), unix.Close(f.memory), f.sys.Close())
}

// clear frees the sampled machines.
func (f *floorHere) clear() error {
	var errs []error
	for _, undo := range slices.Backward(f.undo) {
		errs = append(errs, undo())
	}
	f.undo = nil
	return errors.Join(errs...)
}

// Sample starts one machine and returns how long it took until the host saw its first
// instruction. The machine stays until clear.
func (f *floorHere) Sample() (time.Duration, error) {
	start := time.Now()
	vm, err := f.sys.CreateVM()
	if err != nil {
		return 0, err
	}
	f.undo = append(f.undo, vm.Close)
	if err := vm.EnableSplitIRQChip(24); err != nil {
		return 0, err
	}
	mem, err := unix.MmapPtr(f.memory, 0, nil, floorMemory, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_NORESERVE)
	if err != nil {
		return 0, fmt.Errorf("map the floor's memory: %w", err)
	}
	f.undo = append(f.undo, func() error { return unix.MunmapPtr(mem, floorMemory) })
	if err := vm.SetMemory(0, 0, floorMemory, uintptr(mem)); err != nil {
		return 0, err
	}
	c, err := vm.CreateVCPU(0)
	if err != nil {
		return 0, err
	}
	f.undo = append(f.undo, c.Close)
	if err := f.run(c); err != nil {
		return 0, err
	}
	return time.Since(start), nil
}

func (f *floorHere) run(c *kvm.VCPU) error {
	s, err := c.Sregs()
	if err != nil {
		return err
	}
	s.CS.Base, s.CS.Selector = 0, 0
	if err := c.SetSregs(s); err != nil {
		return err
	}
	if err := c.SetRegs(kvm.Regs{RIP: floorEntry, RFLAGS: 2}); err != nil {
		return err
	}
	for {
		err := c.Run()
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("run the floor's machine: %w", err)
		case c.ExitReason() != kvm.ExitIO:
			return fmt.Errorf("the floor's machine exited with reason %d, not with its port write", c.ExitReason())
		}
		return nil
	}
}
