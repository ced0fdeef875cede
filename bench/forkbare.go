package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm"
	"agentrun.dev/internal/vmm/guestmem"
	"agentrun.dev/internal/vmm/kvm"
	"golang.org/x/sys/unix"
)

// ForkBare measures forks of the bare test guest, in this process: the cost of a fork
// on the host's side, on any KVM.
func ForkBare(ctx context.Context, cfg ForkConfig) (_ ForkReport, err error) {
	report := ForkReport{Engine: string(pick.MicroVM), Guest: GuestTest, Memory: cfg.Memory, VCPUs: cfg.VCPUs, Count: cfg.Count}
	sys, err := kvm.Open()
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	f, err := freezeBare(sys, cfg)
	if err != nil {
		return report, fmt.Errorf("bench fork: %w", err)
	}
	defer func() { err = errors.Join(err, f.layer.Close()) }()
	if err := f.measure(ctx, cfg, &report); err != nil {
		return report, err
	}
	if err := f.weigh(ctx, cfg, &report); err != nil {
		return report, err
	}
	report.Walls, err = walls(ctx, cfg, func(context.Context) (func() error, error) {
		vm, err := f.fork()
		if err != nil {
			return nil, err
		}
		return closer(vm), nil
	})
	return report, err
}

func closer(vm *vmm.VM) func() error {
	return func() error {
		_, err := vm.Close()
		return err
	}
}

// measure makes forks one after the other, half of them from spares made ahead, and
// samples the floor in between. Each machine is gone before the next is made. A
// process of AgentRun has one machine; with hundreds in one process, every change of
// its mappings would be announced to all of them.
func (f *frozenBare) measure(ctx context.Context, cfg ForkConfig, report *ForkReport) (err error) {
	floor, err := newFloorHere()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, floor.Close()) }()
	var floors, restored, first, spares []time.Duration
	for i := range cfg.Count + warmUps {
		if err := ctx.Err(); err != nil {
			return err
		}
		d, err := floor.Sample()
		if err = errors.Join(err, floor.clear()); err != nil {
			return err
		}
		load, run, err := f.once(false)
		if err != nil {
			return err
		}
		_, fromSpare, err := f.once(true)
		if err != nil {
			return err
		}
		if i >= warmUps {
			floors, restored = append(floors, d), append(restored, load)
			first, spares = append(first, run), append(spares, fromSpare)
		}
	}
	report.Floor, report.Restored = Summarize(floors), Summarize(restored)
	report.FirstInstruction, report.FromSpare = Summarize(first), Summarize(spares)
	report.Noisy = report.Floor.Noisy()
	return nil
}

// once makes one fork and ends it. With ahead the time starts after the spare is
// made, and otherwise before.
func (f *frozenBare) once(ahead bool) (loaded, ran time.Duration, err error) {
	start := time.Now()
	spare, err := vmm.NewSpare(f.config(f.sys))
	if err != nil {
		return 0, 0, err
	}
	if ahead {
		start = time.Now()
	}
	vm, loaded, ran, err := f.start(spare, start)
	if err != nil {
		return 0, 0, err
	}
	return loaded, ran, closer(vm)()
}

// weigh keeps Count forks alive at once, to measure the memory of each.
func (f *frozenBare) weigh(ctx context.Context, cfg ForkConfig, report *ForkReport) (err error) {
	var undo []func() error
	defer func() { err = errors.Join(err, undoAll(undo)) }()
	kernel := newKernelMemory()
	before, err := kernel.read()
	if err != nil {
		return err
	}
	begin, _, err := ownMemory()
	if err != nil {
		return err
	}
	for range cfg.Count {
		if err := ctx.Err(); err != nil {
			return err
		}
		vm, err := f.fork()
		if err != nil {
			return err
		}
		undo = append(undo, closer(vm))
	}
	grown, err := kernel.grown(before)
	if err != nil {
		return err
	}
	end, _, err := ownMemory()
	if err != nil {
		return err
	}
	report.AfterAnswer = end.perFork(begin, grown, len(undo))
	report.KernelFrom, report.Alive = kernel.From, len(undo)
	return nil
}

// fork makes a fork and lets it run.
func (f *frozenBare) fork() (*vmm.VM, error) {
	spare, err := vmm.NewSpare(f.config(f.sys))
	if err != nil {
		return nil, err
	}
	vm, _, _, err := f.start(spare, time.Now())
	return vm, err
}

// frozenBare is a frozen bare guest.
type frozenBare struct {
	sys    *kvm.System
	state  *vmm.State
	layer  *os.File
	mapped []guestmem.Mapping
}

func (f *frozenBare) config(sys *kvm.System) vmm.SpareConfig {
	return vmm.SpareConfig{KVM: sys, Memory: f.state.Memory, VCPUs: len(f.state.VCPUs), Profile: f.state.Profile, Layers: f.mapped}
}

// start loads a guest into a spare and runs it to its first port access.
func (f *frozenBare) start(spare *vmm.Spare, since time.Time) (vm *vmm.VM, loaded, ran time.Duration, err error) {
	m := newMarker()
	if vm, err = spare.Load(f.state, vmm.Devices{Marker: m}); err != nil {
		return nil, 0, 0, err
	}
	loaded = time.Since(since)
	m.done = vm.Done()
	if err := vm.Start(); err != nil {
		return nil, 0, 0, err
	}
	select {
	case at := <-m.asked:
		return vm, loaded, at.Sub(since), nil
	case <-vm.Done():
		return nil, 0, 0, fmt.Errorf("a forked test guest ended: %v", vm.Wait())
	}
}

// marker is a host that records when the guest first asks for a command.
type marker struct {
	booted chan struct{}
	asked  chan time.Time
	// done blocks a guest that has asked until it is closed, so that the guest costs
	// no time. With nil the guest asks again.
	done <-chan struct{}
}

func newMarker() *marker {
	return &marker{booted: make(chan struct{}, 1), asked: make(chan time.Time, 1)}
}

func (m *marker) Out(uint32) {
	select {
	case m.booted <- struct{}{}:
	default:
	}
}

// In is called from the thread of one vCPU.
func (m *marker) In(uint16) uint32 {
	if m.done != nil {
		m.asked <- time.Now()
		<-m.done
	}
	return 0 // no command
}

// freezeBare boots the test guest and saves it.
func freezeBare(sys *kvm.System, cfg ForkConfig) (_ *frozenBare, err error) {
	kernel, err := assets.Open(assets.TestGuest)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, kernel.Close()) }()
	pagemap, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, pagemap.Close()) }()
	m := newMarker()
	vm, err := vmm.Boot(vmm.Config{
		KVM: sys, Kernel: kernel, Memory: cfg.Memory, VCPUs: cfg.VCPUs, Devices: vmm.Devices{Marker: m},
	})
	if err != nil {
		return nil, err
	}
	defer func() {
		_, closeErr := vm.Close()
		err = errors.Join(err, closeErr)
	}()
	if err := vm.Start(); err != nil {
		return nil, err
	}
	<-m.booted
	if err := vm.Pause(); err != nil {
		return nil, err
	}
	f := &frozenBare{sys: sys}
	if f.state, err = vm.Save(sys); err != nil {
		return nil, err
	}
	data, _, err := vm.ChangedMemory(pagemap)
	if err != nil {
		return nil, err
	}
	data = layer.Gather(data) // as vmmserver does
	fd, err := unix.MemfdCreate("layer", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, err
	}
	f.layer = os.NewFile(uintptr(fd), "layer")
	if err := vm.WriteMemory(f.layer, data); err != nil {
		return nil, errors.Join(err, f.layer.Close())
	}
	const seals = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(f.layer.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		return nil, errors.Join(err, f.layer.Close())
	}
	offset := uint64(0)
	for _, s := range data {
		f.mapped = append(f.mapped, guestmem.Mapping{Run: s, File: f.layer, Offset: offset})
		offset += s.Length
	}
	return f, nil
}
