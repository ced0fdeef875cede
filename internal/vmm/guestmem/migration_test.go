package guestmem

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/storage/extent"
	"golang.org/x/sys/unix"
)

// TestCaptureWhilePagesMove: the guest writes to pages for the first time and is
// captured repeatedly, while the kernel moves its pages all the time (compaction). No
// capture lacks a page or has an old one.
func TestCaptureWhilePagesMove(t *testing.T) {
	for _, layered := range []bool{false, true} {
		t.Run(fmt.Sprintf("layered=%t", layered), func(t *testing.T) {
			g := newMovedGuest(t, layered)
			g.captureWhilePagesMove(g.m.NewCapture)
		})
	}
}

// captureWhilePagesMove makes captures for some seconds, and for longer if the kernel
// has not moved a page by then, because the host is busy.
func (g *movedGuest) captureWhilePagesMove(newCapture func(CaptureConfig) *Capture) {
	t := g.t
	compactMemory(t)
	before, rounds, begin := movedPages(t), 0, time.Now()
	goOn := func() bool {
		passed := time.Since(begin)
		return passed < 3*time.Second || passed < 2*time.Minute && movedPages(t) == before
	}
	for goOn() && !t.Failed() {
		g.scatter()
		for range 16 {
			g.capture(rounds, newCapture)
			rounds++
		}
	}
	moved := movedPages(t) - before
	t.Logf("seed %d: %d captures, while the kernel moved %d pages", g.seed, rounds, moved)
	if moved == 0 && !t.Failed() {
		t.Skip("the kernel moved no page: this shows nothing")
	}
}

// compactMemory has the kernel compact memory until the test ends.
func compactMemory(t *testing.T) {
	t.Helper()
	f, err := os.OpenFile("/proc/sys/vm/compact_memory", os.O_WRONLY, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		t.Skip("this kernel has no compaction")
	case errors.Is(err, fs.ErrPermission):
		t.Skip("only root may have the kernel compact memory")
	case err != nil:
		t.Fatal(err)
	}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
			}
			_, _ = f.WriteAt([]byte("1"), 0) // EINTR: the next one comes at once
		}
	}()
	t.Cleanup(func() {
		close(stop)
		<-done
		_ = f.Close()
	})
}

// movedPages returns how many pages the kernel has moved.
func movedPages(t *testing.T) (n uint64) {
	t.Helper()
	text, err := os.ReadFile("/proc/vmstat")
	if err != nil {
		t.Fatal(err)
	}
	_, after, ok := strings.Cut(string(text), "\npgmigrate_success ")
	if !ok {
		t.Skip("this kernel does not count the pages that it moves")
	}
	if _, err := fmt.Sscan(after, &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// movedGuest is a guest whose pages each begin with a number. Its vCPU writes
// while it is captured.
type movedGuest struct {
	t       *testing.T
	seed    uint64
	r       *rand.Rand
	m       *Memory
	layered bool
	// between lies among the guest's pages. When it is freed, the kernel has room
	// to move the guest's pages into.
	between []byte
	scratch *os.File

	mu    sync.Mutex // held by the vCPU while it writes, and by the test while the guest stands still
	now   []uint64   // the number of each page
	stack []uint64   // the number of each page in the layer below
}

const movedGuestPages = 48 << 20 / PageSize

func newMovedGuest(t *testing.T, layered bool) *movedGuest {
	g := &movedGuest{
		t: t, seed: uint64(time.Now().UnixNano()), layered: layered, scratch: newMemfd(t, nil),
		now: make([]uint64, movedGuestPages), stack: make([]uint64, movedGuestPages),
	}
	g.r = rand.New(rand.NewPCG(g.seed, 2))
	var err error
	g.between, err = unix.Mmap(-1, 0, 2*movedGuestPages*PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	_ = unix.Madvise(g.between, unix.MADV_NOHUGEPAGE)
	var mappings []Mapping
	if layered {
		content := make([]byte, movedGuestPages*PageSize)
		for p := range g.stack {
			g.stack[p] = 1<<63 | uint64(p)
			binary.LittleEndian.PutUint64(content[p*PageSize:], g.stack[p])
		}
		mappings = []Mapping{{extent.Run{Start: 0, Length: uint64(len(content))}, newMemfd(t, content), 0}}
	}
	if g.m, err = NewLayered(movedGuestPages*PageSize, mappings); err != nil {
		t.Fatal(err)
	}
	_ = unix.Madvise(g.m.regions[0].bytes, unix.MADV_NOHUGEPAGE)
	t.Cleanup(func() {
		if err := errors.Join(g.m.Close(), unix.Munmap(g.between)); err != nil {
			t.Error(err)
		}
	})
	return g
}

// scatter makes a new guest whose pages lie among others that are then freed. The
// guest has not written to all of its pages.
func (g *movedGuest) scatter() {
	b := g.m.regions[0].bytes
	if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
		g.t.Fatal(err)
	}
	copy(g.now, g.stack)
	for p := range uint64(movedGuestPages) {
		g.between[2*p*PageSize], g.between[(2*p+1)*PageSize] = 1, 1
		if p%8 != 7 {
			g.write(p)
		}
	}
	if err := unix.Madvise(g.between, unix.MADV_DONTNEED); err != nil {
		g.t.Fatal(err)
	}
}

// write gives a page a new number, as a vCPU does: the fault is taken inside a
// system call.
func (g *movedGuest) write(page uint64) {
	g.now[page] = g.r.Uint64() >> 1
	var p [8]byte
	binary.LittleEndian.PutUint64(p[:], g.now[page])
	guestWrite(g.t, g.m, g.scratch, page*PageSize, p[:])
}

// run runs the vCPU until the returned function is called. The vCPU is slow, so
// that it leaves some blocks unwritten.
func (g *movedGuest) run() (end func()) {
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
			}
			g.mu.Lock()
			g.write(g.r.Uint64N(movedGuestPages))
			g.mu.Unlock()
		}
	}()
	return func() { close(stop); <-done }
}

// capture compares each page of a capture with its content at the instant.
func (g *movedGuest) capture(round int, newCapture func(CaptureConfig) *Capture) {
	t := g.t
	file := newMemfd(t, nil)
	defer func() { _ = file.Close() }()
	c := newCapture(CaptureConfig{
		Userfaultfd: openFile(t, "/dev/userfaultfd", os.O_RDWR), Pagemap: openFile(t, "/proc/self/pagemap", os.O_RDONLY), File: file,
	})
	end := g.run()
	still := func(do func() error) {
		g.mu.Lock()
		defer g.mu.Unlock()
		if err := do(); err != nil {
			t.Error(err)
		}
	}
	if c.Early() && round%4 != 1 {
		still(c.Announce)
		if err := c.Arm(); err != nil {
			t.Error(err)
		}
	}
	var was []uint64
	still(func() error {
		was = append(was, g.now...)
		return c.Begin()
	})
	if round%3 != 0 {
		end()
		end = func() {}
	}
	data, zeros, err := c.List(nil)
	// Copying takes longest, and the kernel moves pages in bursts. So most rounds only
	// list the pages to be copied.
	copied := round%16 > 13
	if err == nil && copied {
		err = c.Copy(data)
	}
	end()
	if err := errors.Join(err, c.Close()); err != nil {
		t.Fatal(err)
	}
	got := append([]uint64(nil), g.stack...)
	for _, s := range zeros {
		clear(got[s.Start/PageSize : s.End()/PageSize])
	}
	var number [8]byte
	for _, s := range data {
		if !copied {
			copy(got[s.Start/PageSize:s.End()/PageSize], was[s.Start/PageSize:])
			continue
		}
		for at := s.Start; at < s.End(); at += PageSize {
			if _, err := file.ReadAt(number[:], int64(at)); err != nil {
				t.Fatal(err)
			}
			got[at/PageSize] = binary.LittleEndian.Uint64(number[:])
		}
	}
	wrong := 0
	for p := range was {
		if got[p] == was[p] {
			continue
		}
		if wrong++; wrong == 1 {
			t.Errorf("capture %d: page %d is %#x, it was %#x (the stack below has %#x)", round, p, got[p], was[p], g.stack[p])
		}
	}
	if wrong > 0 {
		t.Errorf("capture %d: %d pages are not what they were", round, wrong)
	}
	if !copied {
		return
	}
	// The memory itself has lost no write.
	for p := range g.now {
		var want [8]byte
		binary.LittleEndian.PutUint64(want[:], g.now[p])
		if err := g.m.Read(uint64(p)*PageSize, number[:]); err != nil || !bytes.Equal(number[:], want[:]) {
			t.Fatalf("capture %d: page %d of the memory begins with %x, not %x (%v)", round, p, number, want, err)
		}
	}
}
