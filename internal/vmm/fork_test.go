package vmm

import (
	"bytes"
	"fmt"
	"os"
	"reflect"
	"slices"
	"sync"
	"testing"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/vmm/guestmem"
	"agentrun.dev/internal/vmm/kvm"
	"agentrun.dev/test/soak"
	"golang.org/x/sys/unix"
)

// frozen is a saved bare guest: its state as in a file, and its memory as one
// sealed layer.
type frozen struct {
	state  []byte
	layer  *os.File
	runs   []extent.Run
	memory uint64
	vcpus  int
	// inPlace says that each run is in the layer at its own offset.
	inPlace bool
}

func pagemap(t testing.TB) *os.File {
	t.Helper()
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// freeze saves a running guest, which continues. below is the snapshot it was
// forked from: the new layer also contains below's memory.
func freeze(t testing.TB, sys *kvm.System, g *testGuest, below *frozen) *frozen {
	t.Helper()
	if err := g.Pause(); err != nil {
		t.Fatal(err)
	}
	s, err := g.Save(sys)
	if err != nil {
		t.Fatal(err)
	}
	state, err := s.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	data, _, err := g.ChangedMemory(pagemap(t))
	if err != nil {
		t.Fatal(err)
	}
	if below != nil {
		data = extent.Unite(data, below.runs)
	}
	fd, err := unix.MemfdCreate("layer", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "layer")
	t.Cleanup(func() { _ = f.Close() })
	if err := g.WriteMemory(f, data); err != nil {
		t.Fatal(err)
	}
	const seals = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	if err := g.Resume(); err != nil {
		t.Fatal(err)
	}
	return &frozen{state: state, layer: f, runs: data, memory: s.Memory, vcpus: len(s.VCPUs)}
}

func (f *frozen) mappings() (out []guestmem.Mapping) {
	offset := uint64(0)
	for _, s := range f.runs {
		if f.inPlace {
			offset = s.Start
		}
		out = append(out, guestmem.Mapping{Run: s, File: f.layer, Offset: offset})
		offset += s.Length
	}
	return out
}

func (f *frozen) spare(t testing.TB, sys *kvm.System) *Spare {
	t.Helper()
	s, err := NewSpare(SpareConfig{KVM: sys, Memory: f.memory, VCPUs: f.vcpus, Layers: f.mappings()})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// load runs a child in a spare.
func (f *frozen) load(t testing.TB, s *Spare) *testGuest {
	t.Helper()
	state, err := UnmarshalState(f.state)
	if err != nil {
		t.Fatal(err)
	}
	g := newTestGuest()
	if g.VM, err = s.Load(state, Devices{Marker: g}); err != nil {
		t.Fatal(err)
	}
	if err := g.Start(); err != nil {
		t.Fatal(err)
	}
	return g
}

// fork makes a child that lives until the end of the test.
func (f *frozen) fork(t testing.TB, sys *kvm.System) *testGuest {
	t.Helper()
	g := f.load(t, f.spare(t, sys))
	t.Cleanup(func() {
		if _, err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return g
}

func (g *testGuest) mustDo(t testing.TB, want uint32, command ...uint32) {
	t.Helper()
	if got := g.do(t, command...); got != want {
		t.Errorf("command %v: %d, not %d", command, got, want)
	}
}

const firstPage = 32 << 20 / guestmem.PageSize // above the guest's own memory

// TestForkGoesOn: children continue from the parent's memory. Neither the
// parent nor another child sees the writes of a child.
func TestForkGoesOn(t *testing.T) {
	for _, vcpus := range []int{1, 2} {
		t.Run(fmt.Sprintf("%d vCPUs", vcpus), func(t *testing.T) {
			sys := openKVM(t)
			parent := bootTestGuest(t, 64<<20, vcpus)
			parent.mustDo(t, 1000, cmdDirty, firstPage, 1000, 1, 7)
			f := freeze(t, sys, parent, nil)

			// The parent continues: later writes are its own.
			parent.mustDo(t, 100, cmdDirty, firstPage, 100, 1, 8)

			var children []*testGuest
			for i := range 8 {
				c := f.fork(t, sys)
				children = append(children, c)
				c.mustDo(t, 1000, cmdCheck, firstPage, 1000, 1, 7)
				c.mustDo(t, 50, cmdDirty, firstPage, 50, 1, uint32(100+i))
				c.mustDo(t, 500, cmdDirty, firstPage+4000, 500, 1, uint32(100+i)) // was never touched
			}
			for i, c := range children {
				c.mustDo(t, 50, cmdCheck, firstPage, 50, 1, uint32(100+i))
				c.mustDo(t, 950, cmdCheck, firstPage+50, 950, 1, 7)
				c.mustDo(t, 500, cmdCheck, firstPage+4000, 500, 1, uint32(100+i))
			}
			parent.mustDo(t, 100, cmdCheck, firstPage, 100, 1, 8)
			parent.mustDo(t, 900, cmdCheck, firstPage+100, 900, 1, 7)
			f.fork(t, sys).mustDo(t, 1000, cmdCheck, firstPage, 1000, 1, 7)
		})
	}
}

// TestForkOfFork forks five generations: each has all earlier writes.
func TestForkOfFork(t *testing.T) {
	sys := openKVM(t)
	g := bootTestGuest(t, 64<<20, 1)
	var f *frozen
	for depth := range uint32(6) {
		g.mustDo(t, 20, cmdDirty, firstPage+depth*20, 20, 1, depth)
		f = freeze(t, sys, g, f)
		g = f.fork(t, sys)
		for d := range depth + 1 {
			g.mustDo(t, 20, cmdCheck, firstPage+d*20, 20, 1, d)
		}
	}
}

// TestForksAtOnce: many forks live at the same time, each with its own memory.
func TestForksAtOnce(t *testing.T) {
	sys := openKVM(t)
	parent := bootTestGuest(t, 64<<20, 1)
	parent.mustDo(t, 64, cmdDirty, firstPage, 64, 1, 1)
	f := freeze(t, sys, parent, nil)
	guests := make([]*testGuest, soak.Count(500, 100))
	var wg sync.WaitGroup
	for i := range guests {
		guests[i] = f.fork(t, sys)
	}
	for i, g := range guests {
		wg.Go(func() {
			g.mustDo(t, 32, cmdDirty, firstPage, 32, 1, uint32(1000+i))
			g.mustDo(t, 32, cmdCheck, firstPage, 32, 1, uint32(1000+i))
			g.mustDo(t, 32, cmdCheck, firstPage+32, 32, 1, 1)
		})
	}
	wg.Wait()
}

// TestDiscardedLayerReadsZeros: the old content of pages that a guest gave back
// does not return from the layer below, neither in the guest nor in its
// children.
func TestDiscardedLayerReadsZeros(t *testing.T) {
	sys := openKVM(t)
	parent := bootTestGuest(t, 64<<20, 1)
	parent.mustDo(t, 100, cmdDirty, firstPage, 100, 1, 7)
	child := freeze(t, sys, parent, nil).fork(t, sys)
	if err := child.mem.Discard((firstPage+10)*guestmem.PageSize, 20*guestmem.PageSize); err != nil {
		t.Fatal(err)
	}
	child.mustDo(t, 80, cmdCheck, firstPage, 100, 1, 7)
	if err := child.Pause(); err != nil {
		t.Fatal(err)
	}
	_, zeros, err := child.ChangedMemory(pagemap(t))
	if err != nil {
		t.Fatal(err)
	}
	want := extent.Run{Start: (firstPage + 10) * guestmem.PageSize, Length: 20 * guestmem.PageSize}
	found := false
	for _, z := range zeros {
		found = found || z.Start <= want.Start && z.Start+z.Length >= want.Start+want.Length
	}
	if !found {
		t.Errorf("discarded pages %+v are not among the zeros %+v", want, zeros)
	}
}

// TestStateRoundTrip: encoding and decoding a state does not change it.
func TestStateRoundTrip(t *testing.T) {
	sys := openKVM(t)
	g := bootTestGuest(t, 64<<20, 2)
	f := freeze(t, sys, g, nil)
	s, err := UnmarshalState(f.state)
	if err != nil {
		t.Fatal(err)
	}
	again, err := s.Marshal()
	if err != nil || !bytes.Equal(again, f.state) {
		t.Fatalf("encoded again it differs (%v)", err)
	}
	s2, err := UnmarshalState(again)
	if err != nil || !reflect.DeepEqual(s, s2) {
		t.Fatalf("decoded again it differs (%v)", err)
	}
	if s.VCPUs[0].Regs.RIP == 0 || len(s.VCPUs) != 2 || len(s.VCPUs[0].MSRs) < 10 || s.Clock.Nanoseconds == 0 || s.TSCKHz == 0 {
		t.Errorf("state lacks something: %d vCPUs, %d MSRs, %+v", len(s.VCPUs), len(s.VCPUs[0].MSRs), s.Clock)
	}
}

// TestLoadSetsProcessors: registers that already have their saved value may be
// skipped, but afterwards all have their saved values.
func TestLoadSetsProcessors(t *testing.T) {
	sys := openKVM(t)
	f := freeze(t, sys, bootTestGuest(t, 64<<20, 2), nil)
	const nmiMasked = 14 // in struct kvm_vcpu_events
	for name, change := range map[string]func(*VCPUState){
		"as saved":   func(*VCPUState) {},
		"breakpoint": func(c *VCPUState) { c.DebugRegs[1] = 0x55 },
		"halted":     func(c *VCPUState) { c.MPState = kvm.MPHalted },
		"runnable":   func(c *VCPUState) { c.MPState = kvm.MPRunnable },
		"not begun":  func(c *VCPUState) { c.MPState = kvm.MPUninitialized },
		"in an NMI":  func(c *VCPUState) { c.Events[nmiMasked] = 1 },
		"nothing": func(c *VCPUState) {
			c.DebugRegs, c.Events, c.MPState = kvm.ResetDebugRegs, kvm.Events{}, kvm.MPRunnable
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := UnmarshalState(f.state)
			if err != nil {
				t.Fatal(err)
			}
			for i := range s.VCPUs {
				change(&s.VCPUs[i])
			}
			vm, err := f.spare(t, sys).Load(s, Devices{Marker: newTestGuest()})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _, _ = vm.Close() }()
			for i, c := range vm.vcpus {
				want := &s.VCPUs[i]
				if got, err := c.kvm.DebugRegs(); err != nil || got != want.DebugRegs {
					t.Errorf("vCPU %d: debug registers %x, not %x (%v)", i, got, want.DebugRegs, err)
				}
				if got, err := c.kvm.Sregs(); err != nil || got != want.Sregs {
					t.Errorf("vCPU %d: special registers %+v, not %+v (%v)", i, got, want.Sregs, err)
				}
				if got, err := c.kvm.Regs(); err != nil || got != want.Regs {
					t.Errorf("vCPU %d: registers %+v, not %+v (%v)", i, got, want.Regs, err)
				}
				if got, err := c.kvm.LAPIC(); err != nil || got != want.LAPIC {
					t.Errorf("vCPU %d: APIC %x, not %x (%v)", i, got, want.LAPIC, err)
				}
				// Hyper-V's counters tick, on hosts that have them.
				others := append([]uint32{0x4000_0010, 0x4000_0020}, otherMSRs...)
				for _, m := range want.MSRs {
					if got, err := c.kvm.MSR(m.Index); !slices.Contains(others, m.Index) && (err != nil || got != m.Data) {
						t.Errorf("vCPU %d: MSR %#x is %#x, not %#x (%v)", i, m.Index, got, m.Data, err)
					}
				}
				if got, err := c.kvm.MPState(); err != nil || got != want.MPState {
					t.Errorf("vCPU %d: run state %d, not %d (%v)", i, got, want.MPState, err)
				}
				if got, err := c.kvm.Events(); err != nil || got[nmiMasked] != want.Events[nmiMasked] || got.None() != want.Events.None() {
					t.Errorf("vCPU %d: events %x, not %x (%v)", i, got, want.Events, err)
				}
			}
		})
	}
}

// TestStageable: registers staged for a vCPU that waits for its start-up message
// would overwrite those that the message has set.
func TestStageable(t *testing.T) {
	for state, want := range map[kvm.MPState]bool{
		kvm.MPRunnable: true, kvm.MPHalted: true, kvm.MPUninitialized: false, kvm.MPInitReceived: false, kvm.MPSIPIReceived: false,
	} {
		if got := stageable(&VCPUState{MPState: state}); got != want {
			t.Errorf("run state %d: %t", state, got)
		}
	}
	if stageable(&VCPUState{Events: kvm.Events{0: 1}}) {
		t.Error("an exception is under way")
	}
}

// TestLoadRefuses: a state that does not fit is refused, and the error says
// why.
func TestLoadRefuses(t *testing.T) {
	sys := openKVM(t)
	g := bootTestGuest(t, 64<<20, 1)
	f := freeze(t, sys, g, nil)
	for name, tt := range map[string]struct {
		change func(*State)
		want   string
	}{
		"profile": {func(s *State) { s.Profile = "other" }, `CPU profile "other"`},
		"memory":  {func(s *State) { s.Memory *= 2 }, "128 MiB of memory"},
		"vCPUs":   {func(s *State) { s.VCPUs = append(s.VCPUs, s.VCPUs[0]) }, "2 vCPUs"},
		"devices": {func(s *State) { s.Devices = s.Devices[1:] }, "virtio devices"},
		"device":  {func(s *State) { s.Devices[0].Own = s.Devices[0].Own[1:] }, "state of virtio device 0"},
		"kind":    {func(s *State) { s.Devices[0].MMIO.DeviceType = 2 }, "device type 2"},
		"queue":   {func(s *State) { s.Devices[0].MMIO.Queues[0].Size = 3 }, "queue"},
		"xsave":   {func(s *State) { s.VCPUs[0].XSave = s.VCPUs[0].XSave[:100] }, "extended state"},
		"TSC":     {func(s *State) { s.TSCKHz *= 3 }, "kHz"},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := UnmarshalState(f.state)
			if err != nil {
				t.Fatal(err)
			}
			tt.change(s)
			vm, err := f.spare(t, sys).Load(s, Devices{Marker: newTestGuest()})
			if err == nil {
				_, _ = vm.Close()
				if name == "TSC" || name == "queue" {
					return // the host scales the TSC, or the queue is not in use
				}
				t.Fatal("was accepted")
			}
			if !bytes.Contains([]byte(err.Error()), []byte(tt.want)) {
				t.Errorf("error %q does not say %q", err, tt.want)
			}
		})
	}
}

// TestTouchedAhead: a watched fork lists the pages that it has read and written.
// A second fork that gets this list has these pages mapped before it runs, as far
// as KVM can do that, and continues like the first.
func TestTouchedAhead(t *testing.T) {
	sys := openKVM(t)
	parent := bootTestGuest(t, 64<<20, 1)
	parent.mustDo(t, 100, cmdDirty, firstPage, 100, 1, 7)
	f := freeze(t, sys, parent, nil)
	device, pages := openUserfaultfd(t), pagemap(t)
	spare := func(written, read []extent.Run) *Spare {
		t.Helper()
		s, err := NewSpare(SpareConfig{
			KVM: sys, Memory: f.memory, VCPUs: f.vcpus, Layers: f.mappings(), Written: written, Read: read, Watch: device,
		})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	touched := func(vm *VM) (written, read []extent.Run) {
		t.Helper()
		written, read, err := vm.TouchedMemory(pages)
		if err != nil {
			t.Fatal(err)
		}
		return written, read
	}
	use := func(s *Spare) *VM {
		g := f.load(t, s)
		t.Cleanup(func() {
			if _, err := g.Close(); err != nil {
				t.Error(err)
			}
		})
		g.mustDo(t, 5, cmdCheck, firstPage+50, 5, 3, 7)
		g.mustDo(t, 1, cmdDirty, firstPage+20, 1, 1, 8)
		return g.VM
	}
	written, read := touched(use(spare(nil, nil)))
	page := func(n uint64) extent.Run {
		return extent.Run{Start: n * guestmem.PageSize, Length: guestmem.PageSize}
	}
	for n := range uint64(100) {
		is := page(firstPage + n)
		if slices.Contains(written, is) != (n == 20) || slices.Contains(read, is) != (n >= 50 && n < 65 && n%3 == 50%3) {
			t.Errorf("page %d: written %v, read %v", n, written, read)
		}
	}
	s := spare(written, read)
	gotWritten, gotRead := touched(s.vm)
	if !reflect.DeepEqual(gotWritten, written) {
		t.Errorf("written %v, want %v", gotWritten, written)
	}
	if sys.CheckExtension(kvm.CapPreFaultMemory) == 0 {
		read = nil
	}
	if !reflect.DeepEqual(gotRead, read) {
		t.Errorf("read %v, want %v", gotRead, read)
	}
	use(s)
}
