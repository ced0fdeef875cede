package vmm

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/vmm/guestmem"
	"agentrun.dev/internal/vmm/kvm"
	"agentrun.dev/test/soak"
	"golang.org/x/sys/unix"
)

func openUserfaultfd(t testing.TB) *os.File {
	t.Helper()
	f, err := os.OpenFile("/dev/userfaultfd", os.O_RDWR, 0)
	if err != nil {
		t.Fatalf("live forks need /dev/userfaultfd: %v", err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func memfd(t testing.TB) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("layer", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "layer")
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// liveForker captures a bare guest repeatedly, as one source.
type liveForker struct {
	sys      *kvm.System
	uffd     *os.File
	pagemap  *os.File
	mappings []guestmem.Mapping // of the source's stack
	shared   uint64             // bytes shared by all captures
	late     bool               // as with kernels that cannot protect absent pages
}

// still is VM.Still for a guest that may be waiting for a command.
func (g *testGuest) still(do func() error) (time.Duration, error) {
	if err := g.Pause(); err != nil {
		return 0, err
	}
	return 0, errors.Join(do(), g.Resume())
}

func newLiveForker(t testing.TB, sys *kvm.System) *liveForker {
	return &liveForker{sys: sys, uffd: openUserfaultfd(t), pagemap: pagemap(t)}
}

// fork captures g. beside is called as soon as the guest continues, while all
// pages are still protected.
func (l *liveForker) fork(t testing.TB, g *testGuest, share bool, beside func()) *frozen {
	t.Helper()
	file := memfd(t)
	c, err := g.NewCapture(guestmem.CaptureConfig{Userfaultfd: l.uffd, Pagemap: l.pagemap, File: file})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}()
	if ok, why := c.Beside(); l.uffd != nil && !ok {
		t.Fatal(why)
	}
	if !l.late {
		if _, err := c.Arm(g.still); err != nil {
			t.Fatal(err)
		}
	}
	if err := g.Pause(); err != nil {
		t.Fatal(err)
	}
	s, err := g.Save(l.sys)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Begin(); err != nil {
		t.Fatal(err)
	}
	if err := g.Resume(); err != nil {
		t.Fatal(err)
	}
	if beside != nil {
		beside()
	}
	state, err := s.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	var below []extent.Run
	for _, m := range l.mappings {
		below = append(below, m.Run)
	}
	data, _, err := c.List(below)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Copy(data); err != nil {
		t.Fatal(err)
	}
	if share {
		if err := errors.Join(c.Rebase(), c.Share()); err != nil {
			t.Fatal(err)
		}
		l.shared += c.Stats().Shared
		l.mappings = nil
		for _, s := range data {
			l.mappings = append(l.mappings, guestmem.Mapping{Run: s, File: file, Offset: s.Start})
		}
	}
	seal(t, file, unix.F_SEAL_WRITE|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	return &frozen{state: state, layer: file, runs: data, memory: s.Memory, vcpus: len(s.VCPUs), inPlace: true}
}

// TestLiveFork: a child equals the source at the instant of the pause, for any
// writes of the source during the copy.
func TestLiveFork(t *testing.T) {
	for name, how := range map[string]struct{ share, late bool }{
		"shared": {share: true}, "apart": {}, "late": {share: true, late: true},
	} {
		t.Run(name, func(t *testing.T) {
			share := how.share
			sys := openKVM(t)
			source := bootTestGuest(t, 64<<20, 1)
			l := newLiveForker(t, sys)
			l.late = how.late
			source.mustDo(t, 1000, cmdDirty, firstPage, 1000, 1, 7)
			source.mustDo(t, 250, cmdDirty, firstPage+2000, 250, 4, 7)
			for round := range uint32(5) {
				f := l.fork(t, source, share, func() {
					source.mustDo(t, 300, cmdDirty, firstPage, 300, 3, 8+round)      // was dirty
					source.mustDo(t, 200, cmdDirty, firstPage+3500, 200, 2, 8+round) // was absent
				})
				was := 7 + round
				child := f.fork(t, sys)
				child.mustDo(t, 300, cmdCheck, firstPage, 300, 3, was)
				child.mustDo(t, 250, cmdCheck, firstPage+2000, 250, 4, 7)
				if round == 0 {
					child.mustDo(t, 0, cmdCheck, firstPage+3500, 200, 2, 8)
				} else {
					child.mustDo(t, 200, cmdCheck, firstPage+3500, 200, 2, was)
				}
				// Neither sees the other's writes, and the source has lost no
				// write.
				child.mustDo(t, 1000, cmdDirty, firstPage, 1000, 1, 99)
				source.mustDo(t, 300, cmdCheck, firstPage, 300, 3, 8+round)
				source.mustDo(t, 200, cmdCheck, firstPage+3500, 200, 2, 8+round)
				source.mustDo(t, 100, cmdCheck, firstPage+900, 100, 1, 7)
			}
			if share != (l.shared > 0) {
				t.Errorf("%d bytes are shared with the source", l.shared)
			}
		})
	}
}

// soakCount is n in make soak and reduced in make test. It is even lower in the
// testbed, where each step takes ten times as long.
func soakCount(n, reduced int) int {
	if os.Getenv("AGENTRUN_TESTBED") != "" {
		reduced = (reduced + 4) / 5
	}
	return soak.Count(n, reduced)
}

// TestLiveForksInARow: a source that continues to write while it is forked
// repeatedly keeps all of its writes. Each child has all writes up to its
// instant, and the number of the source's mappings does not grow.
func TestLiveForksInARow(t *testing.T) {
	for _, vcpus := range []int{1, 2} {
		t.Run(fmt.Sprintf("%d vCPUs", vcpus), func(t *testing.T) {
			sys := openKVM(t)
			source := bootTestGuest(t, 64<<20, vcpus)
			l := newLiveForker(t, sys)
			const pages = 2000
			source.mustDo(t, pages, cmdDirty, firstPage, pages, 1, 0)
			forks := soakCount(1000, 25)
			var early, late int
			for i := range uint32(forks) {
				source.mustDo(t, 100, cmdDirty, firstPage+i*37%(pages-100), 100, 1, i)
				// All pages get the round's value during the copy.
				f := l.fork(t, source, true, func() { source.send(t, cmdDirty, firstPage, pages, 1, i+1) })
				child := f.load(t, f.spare(t, sys))
				child.mustDo(t, pages, cmdCheck, firstPage, pages, 1, i)
				if _, err := child.Close(); err != nil {
					t.Fatal(err)
				}
				if got := source.result(t); got != pages {
					t.Fatalf("the source wrote %d pages", got)
				}
				source.mustDo(t, pages, cmdCheck, firstPage, pages, 1, i+1)
				source.mustDo(t, pages, cmdDirty, firstPage, pages, 1, i+1)
				n := l.mappingsNow(t)
				if int(i) < forks/2 {
					early = max(early, n)
				} else {
					late = max(late, n)
				}
				if err := f.layer.Close(); err != nil {
					t.Fatal(err)
				}
			}
			if late > early+32 {
				t.Errorf("%d mappings in the first half, %d in the second", early, late)
			}
		})
	}
}

func (l *liveForker) mappingsNow(t testing.TB) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(b, []byte("\n"))
}

// TestDeviceWritesDuringCapture: the VMM writes into protected memory while the
// garbage collector runs all the time. If a write waited for a page fault, the
// process would hang: the collector could not stop that thread, and stops the
// thread that would answer the fault.
func TestDeviceWritesDuringCapture(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(1))
	sys := openKVM(t)
	source := bootTestGuest(t, 64<<20, 1)
	l := newLiveForker(t, sys)
	const pages = 4000
	stop := make(chan struct{})
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(stop)
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				runtime.GC()
			}
		}
	})
	zero, err := os.Open("/dev/zero")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = zero.Close() }()
	for i := range uint32(soakCount(200, 20)) {
		source.mustDo(t, pages, cmdDirty, firstPage, pages, 1, i)
		f := l.fork(t, source, i%2 == 0, func() {
			source.send(t, cmdDirty, firstPage+pages/2, pages/2, 1, i+100000)
			for p := uint64(firstPage); p < firstPage+pages/2; p += 5 {
				gpa := p * guestmem.PageSize
				var err error
				switch p % 4 {
				case 0:
					err = source.mem.Write(gpa, make([]byte, 64))
				case 1:
					err = errors.Join(source.mem.Zero(gpa, 8), source.mem.StoreUint16(gpa+16, 3))
				case 2:
					_, err = source.mem.ReadFile(int(zero.Fd()), 0, []guestmem.Range{{GPA: gpa, Len: 8}})
				case 3:
					err = source.mem.Discard(gpa, guestmem.PageSize)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
		child := f.load(t, f.spare(t, sys))
		child.mustDo(t, pages, cmdCheck, firstPage, pages, 1, i)
		if _, err := child.Close(); err != nil {
			t.Fatal(err)
		}
		if got := source.result(t); got != pages/2 {
			t.Fatalf("the source wrote %d pages", got)
		}
		source.mustDo(t, pages/2, cmdCheck, firstPage+pages/2, pages/2, 1, i+100000)
		source.mustDo(t, pages/2-pages/10, cmdCheck, firstPage, pages/2, 1, i)
	}
}

// TestFailedCapture: if the layer cannot be stored, the fork fails and the
// source continues with all of its writes. The next fork succeeds.
func TestFailedCapture(t *testing.T) {
	sys := openKVM(t)
	source := bootTestGuest(t, 64<<20, 1)
	l := newLiveForker(t, sys)
	source.mustDo(t, 1000, cmdDirty, firstPage, 1000, 1, 7)
	for name, tt := range map[string]struct {
		file   func(*os.File)
		cancel bool
	}{
		"the file is closed":    {file: func(f *os.File) { _ = f.Close() }},
		"the file is read-only": {file: func(f *os.File) { seal(t, f, unix.F_SEAL_WRITE) }},
		"it is cancelled":       {file: func(*os.File) {}, cancel: true},
	} {
		t.Run(name, func(t *testing.T) {
			file := memfd(t)
			c, err := source.NewCapture(guestmem.CaptureConfig{Userfaultfd: l.uffd, Pagemap: l.pagemap, File: file})
			if err != nil {
				t.Fatal(err)
			}
			source.begin(t, c)
			data, _, err := c.List(nil)
			if err != nil {
				t.Fatal(err)
			}
			tt.file(file)
			if tt.cancel {
				c.Cancel(ErrEnded)
			}
			// The guest's first write continues although the page cannot be
			// saved.
			source.mustDo(t, 100, cmdDirty, firstPage, 100, 1, 8)
			if err := c.Copy(data); err == nil {
				t.Error("the copy succeeded")
			}
			if err := c.Rebase(); err == nil {
				t.Error("a memory was rebased to a layer that is not complete")
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			source.mustDo(t, 100, cmdCheck, firstPage, 100, 1, 8)
			source.mustDo(t, 900, cmdCheck, firstPage+100, 900, 1, 7)
			child := l.fork(t, source, false, nil).fork(t, sys)
			child.mustDo(t, 100, cmdCheck, firstPage, 100, 1, 8)
			child.mustDo(t, 900, cmdCheck, firstPage+100, 900, 1, 7)
		})
	}
}

// begin begins a capture while the guest is paused.
func (g *testGuest) begin(t testing.TB, c *Capture) {
	t.Helper()
	if err := g.Pause(); err != nil {
		t.Fatal(err)
	}
	if err := c.Begin(); err != nil {
		t.Fatal(err)
	}
	if err := g.Resume(); err != nil {
		t.Fatal(err)
	}
}

func seal(t testing.TB, f *os.File, seals int) {
	t.Helper()
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
}

// TestCloseDuringCapture: a VM that ends in the middle of a capture waits for
// it, and the capture fails.
func TestCloseDuringCapture(t *testing.T) {
	for range soakCount(100, 10) {
		source := bootTestGuest(t, 64<<20, 1)
		source.mustDo(t, 2000, cmdDirty, firstPage, 2000, 1, 7)
		c, err := source.NewCapture(guestmem.CaptureConfig{Userfaultfd: openUserfaultfd(t), Pagemap: pagemap(t), File: memfd(t)})
		if err != nil {
			t.Fatal(err)
		}
		source.begin(t, c)
		source.send(t, cmdDirty, firstPage, 2000, 1, 8) // it may be waiting for a page when the VM ends
		closed := make(chan error, 1)
		go func() {
			_, err := source.Close()
			closed <- err
		}()
		data, _, err := c.List(nil)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Copy(data) // complete or cancelled, depending on the timing
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if err := <-closed; err != nil {
			t.Error(err)
		}
		if _, err := source.NewCapture(guestmem.CaptureConfig{}); !errors.Is(err, ErrEnded) {
			t.Errorf("capture of a closed VM: %v", err)
		}
	}
}

// TestStill: a guest stands still while do runs, and its processors run again
// when Still returns.
func TestStill(t *testing.T) {
	g, sys := bootTestGuest(t, 64<<20, 1), openKVM(t)
	var took time.Duration
	defer g.nudged()()
	stood, err := g.Still(func() error {
		began := time.Now()
		_, err := g.Save(sys)
		took = time.Since(began)
		return err
	})
	if err != nil || stood < took {
		t.Errorf("the guest stood still for %v, %v, while something took %v", stood, err, took)
	}
	g.gate.mu.Lock()
	defer g.gate.mu.Unlock()
	if g.gate.parked != 0 {
		t.Errorf("%d processors still stand", g.gate.parked)
	}
}
