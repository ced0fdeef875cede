package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"

	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm"
	"agentrun.dev/internal/vmm/guestmem"
	"agentrun.dev/internal/vmm/kvm"
	"golang.org/x/sys/unix"
)

// Commands of the bare test guest (guest/testguest/testguest.c).
const (
	bareDirty   = 2
	bareRead    = 4
	bareSpin    = 6
	bareClasses = 11
)

// bareFirstPage is above the memory of the bare guest itself.
const bareFirstPage = 32 << 20 / guestmem.PageSize

// LiveBare measures live forks of the bare test guest, in this process.
func LiveBare(ctx context.Context, cfg LiveConfig) (report LiveReport, err error) {
	report = newLiveReport(GuestTest, cfg)
	pages := cfg.Dirty / guestmem.PageSize
	if end := (bareFirstPage + pages*uint64(cfg.Stride)) * guestmem.PageSize; cfg.Stride < 1 || pages == 0 || end > cfg.Memory {
		return report, fmt.Errorf("bench live: %d pages, %d apart, do not fit into %d MiB of memory", pages, cfg.Stride, cfg.Memory>>20)
	}
	// A vCPU keeps its P while it is in the guest, as in a vmm process. The goroutine
	// that answers its writes must find a free P, whatever else runs.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2*cfg.VCPUs + 4))
	b, err := newLiveBare(cfg)
	if err != nil {
		return report, fmt.Errorf("bench live: %w", err)
	}
	defer func() { err = errors.Join(err, b.close()) }()
	floor, err := NewFloor()
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, floor.Close()) }()
	// All RAM has been touched, as after a while of work.
	if err := b.source.do(bareRead, 0, uint32(cfg.Memory/guestmem.PageSize), 1); err != nil {
		return report, fmt.Errorf("bench live: %w", err)
	}
	var s liveSamples
	for i := range cfg.Count + warmUps {
		if err := ctx.Err(); err != nil {
			return report, err
		}
		if i == warmUps {
			s = liveSamples{}
		}
		d, err := floor.Sample()
		if err != nil {
			return report, err
		}
		s.floor = append(s.floor, d)
		if err := b.round(&s, &report); err != nil {
			return report, fmt.Errorf("bench live: %w", err)
		}
	}
	s.summarize(&report)
	return report, nil
}

// liveBare is a bare guest that is forked repeatedly.
type liveBare struct {
	cfg           LiveConfig
	sys           *kvm.System
	pagemap, uffd *os.File // uffd may be nil
	source        *bareGuest
	pages         uint32
	khz           uint64
	spins         uint32             // readings of a spin of the right length
	below         []guestmem.Mapping // the source's current mappings
	layer         *os.File           // the file of these mappings
	lingers       *vmm.Capture       // the last capture, until leave
}

func newLiveBare(cfg LiveConfig) (_ *liveBare, err error) {
	b := &liveBare{cfg: cfg, pages: uint32(cfg.Dirty / guestmem.PageSize)}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	if b.sys, err = kvm.Open(); err != nil {
		return nil, err
	}
	if b.pagemap, err = os.Open("/proc/self/pagemap"); err != nil {
		return nil, err
	}
	if b.uffd, err = os.OpenFile("/dev/userfaultfd", os.O_RDWR, 0); err != nil {
		b.uffd = nil // memory is then copied during the pause, and the report says so
	}
	kernel, err := assets.Open(assets.TestGuest)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, kernel.Close()) }()
	g := newBareGuest()
	if g.vm, err = vmm.Boot(vmm.Config{KVM: b.sys, Kernel: kernel, Memory: cfg.Memory, VCPUs: cfg.VCPUs, Devices: vmm.Devices{Marker: g}}); err != nil {
		return nil, err
	}
	b.source = g
	if err := g.vm.Start(); err != nil {
		return nil, err
	}
	if _, err := g.result(); err != nil { // the guest's first result
		return nil, err
	}
	return b, nil
}

func (b *liveBare) close() error {
	var errs []error
	if b.source != nil {
		errs = append(errs, b.leave())
		_, err := b.source.vm.Close()
		errs = append(errs, err)
	}
	for _, f := range []*os.File{b.layer, b.pagemap, b.uffd} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	if b.sys != nil {
		errs = append(errs, b.sys.Close())
	}
	return errors.Join(errs...)
}

// dirty makes the source write to its memory.
func (b *liveBare) dirty() error {
	return b.source.do(bareDirty, bareFirstPage, b.pages, uint32(b.cfg.Stride), 1)
}

// leastStall is the shortest duration of a write that may have waited.
const leastStall = 4 * time.Microsecond

// timed lets the source write to its memory once more while begin runs. It returns
// the durations of the single writes, and of all of them together.
func (b *liveBare) timed(begin func() error, forks bool) (w writes, all time.Duration, err error) {
	if forks { // in practice the pages left by the last fork are shared long before the next
		if err := b.leave(); err != nil {
			return w, 0, err
		}
	}
	start := time.Now()
	least := uint32(uint64(leastStall) * b.khz / 1e6)
	b.source.commands <- []uint32{bareClasses, bareFirstPage, b.pages, uint32(b.cfg.Stride), 1, least}
	if err := begin(); err != nil {
		return w, 0, err
	}
	w.khz = b.khz
	if w.longest, err = b.source.ticks(b.khz); err != nil {
		return w, 0, err
	}
	all = b.source.at.Sub(start)
	for i := range w.classes {
		if w.classes[i], err = b.source.result(); err != nil {
			return w, 0, err
		}
	}
	_, err = b.source.result()
	return w, all, err
}

// spin lets the source read its TSC while begin runs, and returns the longest gap.
func (b *liveBare) spin(begin func() error) (time.Duration, error) {
	b.source.commands <- []uint32{bareSpin, b.spins}
	if err := begin(); err != nil {
		return 0, err
	}
	return b.source.ticks(b.khz)
}

// spinTime is how long the source reads its TSC. It is longer than a pause.
const spinTime = 200 * time.Millisecond

// calibrate determines how many readings of the TSC take spinTime.
func (b *liveBare) calibrate() error {
	b.spins = 1000
	start := time.Now()
	if _, err := b.spin(func() error { return nil }); err != nil {
		return err
	}
	b.spins = uint32(max(1000, 1000*spinTime/max(time.Since(start), time.Microsecond)))
	return nil
}

// round measures one fork of each kind.
func (b *liveBare) round(s *liveSamples, r *LiveReport) error {
	if err := b.dirty(); err != nil {
		return err
	}
	if b.spins == 0 {
		if _, err := b.fork(0, s, r); err != nil { // reports the TSC's frequency
			return err
		}
		if err := errors.Join(b.calibrate(), b.dirty()); err != nil {
			return err
		}
	}
	nothing := func() error { return nil }
	quiet, pass, err := b.timed(nothing, false)
	if err != nil {
		return err
	}
	s.quietPass = append(s.quietPass, pass)
	gap, err := b.spin(nothing)
	if err != nil {
		return err
	}
	s.quietGap = append(s.quietGap, gap)
	if err := b.leave(); err != nil {
		return err
	}
	gap, err = b.spin(func() error {
		d, err := b.fork(1, s, r)
		s.one = append(s.one, d)
		return err
	})
	if err != nil {
		return err
	}
	s.gap = append(s.gap, gap)
	if _, pass, err = b.timed(nothing, false); err != nil {
		return err
	}
	s.next = append(s.next, pass)
	var served guestmem.CaptureStats
	forked, pass, err := b.timed(func() error {
		_, err := b.fork(0, s, r)
		served = b.lingers.Stats()
		return err
	}, true)
	if err != nil {
		return err
	}
	s.pass = append(s.pass, pass)
	s.served.capture(served)
	all := uint64(b.pages)
	s.writes, s.quietWrites = append(s.writes, forked.slowest(all, 0.99)), append(s.quietWrites, quiet.slowest(all, 0.99))
	n := served.Waits
	s.stalls.add(forked.slowest(n, 0.5), forked.slowest(n, 0.99), forked.longest)
	s.quietStalls.add(quiet.slowest(n, 0.5), quiet.slowest(n, 0.99), quiet.longest)
	d, err := b.fork(10, s, r)
	s.ten = append(s.ten, d)
	return err
}

// fork forks the source and returns once the last of the children has run.
func (b *liveBare) fork(children int, s *liveSamples, r *LiveReport) (_ time.Duration, err error) {
	start := time.Now()
	fd, err := unix.MemfdCreate("layer", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return 0, err
	}
	file := os.NewFile(uintptr(fd), "layer")
	f, err := b.capture(file, s, r)
	if err != nil {
		return 0, errors.Join(err, file.Close())
	}
	old := b.layer
	if b.layer = file; old != nil {
		if err := old.Close(); err != nil { // the new file contains all of its data
			return 0, err
		}
	}
	var last time.Duration
	for range children {
		spare, err := vmm.NewSpare(f.config(b.sys))
		if err != nil {
			return 0, err
		}
		vm, _, ran, err := f.start(spare, start)
		if err != nil {
			return 0, err
		}
		last = ran
		defer func() {
			_, closeErr := vm.Close()
			err = errors.Join(err, closeErr)
		}()
	}
	return last, nil
}

// capture captures the source while it runs, as a vmm process does.
func (b *liveBare) capture(file *os.File, s *liveSamples, r *LiveReport) (_ *frozenBare, err error) {
	if err := b.leave(); err != nil {
		return nil, err
	}
	start := time.Now()
	vm := b.source.vm
	c, err := vm.NewCapture(guestmem.CaptureConfig{Userfaultfd: b.uffd, Pagemap: b.pagemap, File: file, Patience: b.cfg.Patience})
	if err != nil {
		return nil, err
	}
	kept := false
	defer func() {
		if !kept {
			err = errors.Join(err, c.Close())
		}
	}()
	beside, why := c.Beside()
	f := &frozenBare{layer: file}
	store := func() error {
		var below []extent.Run
		for _, m := range b.below {
			below = append(below, m.Run)
		}
		data, _, err := c.List(below)
		if err != nil {
			return err
		}
		data = extent.Coalesce(data, layer.MaxRuns)
		for _, run := range data {
			f.mapped = append(f.mapped, guestmem.Mapping{Run: run, File: file, Offset: run.Start})
		}
		return c.Copy(data)
	}
	stood, err := c.Arm(vm.Still)
	if err != nil {
		return nil, err
	}
	pause, err := vm.Still(func() (err error) {
		if f.state, err = vm.Save(b.sys); err != nil {
			return err
		}
		if err := c.Begin(); err != nil || beside {
			return err
		}
		return store()
	})
	if err == nil && beside {
		err = store()
	}
	if err == nil {
		err = c.Rebase()
	}
	if err != nil {
		return nil, err
	}
	if !beside {
		r.WhyCopiedInPause = why.Error()
	}
	b.below, b.khz = f.mapped, uint64(f.state.TSCKHz)
	s.pause, s.captured = append(s.pause, max(stood, pause)), append(s.captured, time.Since(start))
	r.Copied = c.Stats().Copied
	b.lingers, kept = c, true
	return f, nil
}

// leave shares the pages that the source has not written since the last fork. A vmm
// process does that some time after a fork, or before the next one.
func (b *liveBare) leave() error {
	c := b.lingers
	if c == nil {
		return nil
	}
	b.lingers = nil
	return errors.Join(c.Share(), c.Close())
}

// bareGuest gives commands to a bare guest, one after the other. Without a command,
// the guest asks again and again, so a pause does not wait for a command.
type bareGuest struct {
	vm       *vmm.VM
	commands chan []uint32
	results  chan timedResult
	args     []uint32  // of the command being read; used by the vCPU's thread only
	at       time.Time // of the last result
}

type timedResult struct {
	value uint32
	at    time.Time
}

func newBareGuest() *bareGuest {
	return &bareGuest{commands: make(chan []uint32, 1), results: make(chan timedResult, 4+writeClasses)}
}

func (g *bareGuest) Out(v uint32) { g.results <- timedResult{v, time.Now()} }

func (g *bareGuest) In(port uint16) uint32 {
	if port == vmm.MarkerCommand {
		select {
		case g.args = <-g.commands:
		default:
			return 0
		}
	}
	if len(g.args) == 0 {
		return 0
	}
	v := g.args[0]
	g.args = g.args[1:]
	return v
}

// do runs a command with one result.
func (g *bareGuest) do(command ...uint32) error {
	g.commands <- command
	_, err := g.result()
	return err
}

func (g *bareGuest) result() (uint32, error) {
	select {
	case r := <-g.results:
		g.at = r.at
		return r.value, nil
	case <-g.vm.Done():
		return 0, fmt.Errorf("the test guest ended: %v", g.vm.Wait())
	}
}

// ticks reads a result of two words, in ticks of a TSC.
func (g *bareGuest) ticks(khz uint64) (time.Duration, error) {
	low, err := g.result()
	if err != nil {
		return 0, err
	}
	high, err := g.result()
	if err != nil || khz == 0 {
		return 0, err
	}
	return inTime(uint64(high)<<32|uint64(low), khz), nil
}
