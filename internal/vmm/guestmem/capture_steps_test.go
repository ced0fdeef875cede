package guestmem

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/test/soak"
	"golang.org/x/sys/unix"
)

// captureSteps names the moments of a capture at which tests change the memory, in
// their order.
var captureSteps = []string{
	"NewCapture", "Announce", "Arm", "Begin", "List", "plan", "release", "Copy", "Rebase", "Share", "Close",
}

// stepGuest is a memory, its expected content and the content of its stack.
type stepGuest struct {
	t          *testing.T
	m          *Memory
	now, stack []byte
	actors     []*actor
	gate       sync.RWMutex // held for reading by a working actor, for writing while the guest stands still
}

// stepHow is a way to capture a memory.
type stepHow struct {
	late  bool // without Arm
	hasty bool // without time to look at pages in the pause
	still bool // without userfaultfd
	old   bool // as on kernels before Linux 6.4
	share bool
	// at is called after each step, with the name of the step. The guest does not
	// stand still then.
	at func(step string)
}

// stepSize makes the last block a partial one.
const stepSize = 16<<20 + 5*PageSize

// newStepGuest makes RAM of a layer with zeros in between, or anonymous RAM of which half
// is written.
func newStepGuest(t *testing.T, r *rand.Rand, layered bool) *stepGuest {
	g := &stepGuest{t: t, now: make([]byte, stepSize)}
	content := make([]byte, 12<<20)
	for at := 0; at < len(content); at += PageSize {
		for k := range 16 {
			content[at+k*256] = byte(r.Uint32())
		}
	}
	var err error
	if layered {
		file := newMemfd(t, content)
		mappings := []Mapping{
			{extent.Run{Start: 3 * PageSize, Length: 5 << 20}, file, 0},
			{extent.Run{Start: 6 << 20, Length: 64 << 10}, file, 5 << 20},
			{extent.Run{Start: 6<<20 + 64<<10, Length: 9 * PageSize}, file, 512 << 10},
			{extent.Run{Start: 8 << 20, Length: 6 << 20}, file, 6 << 20},
		}
		for _, m := range mappings {
			copy(g.now[m.Start:m.End()], content[m.Offset:])
		}
		g.m, err = NewLayered(stepSize, mappings)
	} else if g.m, err = NewAnonymous(stepSize); err == nil {
		copy(g.now[1<<20:], content[:8<<20])
		err = g.m.Write(1<<20, content[:8<<20])
	}
	if err != nil {
		t.Fatal(err)
	}
	g.stack = make([]byte, stepSize)
	if layered {
		copy(g.stack, g.now)
	}
	t.Cleanup(func() {
		if err := g.m.Close(); err != nil {
			t.Error(err)
		}
	})
	return g
}

// actor changes its own pages like a vCPU, like a device, or like a guest that gives
// pages back.
type actor struct {
	*stepGuest
	r       *rand.Rand
	scratch *os.File
	does    func(a *actor, page uint64) error
	owns    func(page uint64) bool
}

// balloonFirst and balloonEnd bound the pages that only the balloon uses.
const balloonFirst, balloonEnd = 9 << 20 / PageSize, 15 << 20 / PageSize

// addActors adds a vCPU, a device, and a balloon that also writes. The pages of the
// three are interleaved; the balloon also has some MiB of its own.
func (g *stepGuest) addActors(seed uint64) {
	alone := func(page uint64) bool { return page >= balloonFirst && page < balloonEnd }
	for i, a := range []actor{
		{does: (*actor).asGuest, owns: func(page uint64) bool { return !alone(page) && page%4 < 2 }},
		{does: (*actor).asDevice, owns: func(page uint64) bool { return !alone(page) && page%4 == 2 }},
		{does: (*actor).asBalloon, owns: func(page uint64) bool { return alone(page) || page%4 == 3 }},
	} {
		a.stepGuest, a.r, a.scratch = g, rand.New(rand.NewPCG(seed, uint64(i))), newMemfd(g.t, nil)
		g.actors = append(g.actors, &a)
	}
}

// act makes one change.
func (a *actor) act() error {
	a.gate.RLock()
	defer a.gate.RUnlock()
	for {
		if page := a.r.Uint64N(stepSize / PageSize); a.owns(page) {
			return a.does(a, page)
		}
	}
}

// piece makes new content for part of a page, and puts it into the model.
func (a *actor) piece(page uint64) (gpa uint64, p []byte) {
	from := a.r.Uint64N(PageSize)
	gpa = page*PageSize + from
	p = a.now[gpa : gpa+1+a.r.Uint64N(PageSize-from)]
	x := a.r.Uint64()
	for i := range p {
		p[i] = byte(x >> (i % 8 * 8))
	}
	return gpa, p
}

func (a *actor) asGuest(page uint64) error {
	gpa, p := a.piece(page)
	b, err := a.m.slice(gpa, uint64(len(p)))
	if err != nil {
		return err
	}
	if _, err := a.scratch.WriteAt(p, 0); err != nil {
		return err
	}
	// The fault is taken inside a system call, as a vCPU's is.
	for len(b) > 0 {
		n, err := unix.Pread(int(a.scratch.Fd()), b, int64(len(p)-len(b)))
		if err != nil {
			return fmt.Errorf("a guest's write: %w", err)
		}
		b = b[n:]
	}
	return nil
}

func (a *actor) asDevice(page uint64) error {
	gpa, p := a.piece(page)
	switch a.r.IntN(4) {
	case 0:
		clear(p)
		return a.m.Zero(gpa, uint64(len(p)))
	case 1:
		if _, err := a.scratch.WriteAt(p, 0); err != nil {
			return err
		}
		_, err := a.m.ReadFile(int(a.scratch.Fd()), 0, []Range{{gpa, uint32(len(p))}})
		return err
	case 2:
		at := page * PageSize
		a.now[at], a.now[at+1] = 3, byte(a.r.Uint32())
		return errors.Join(a.m.Write(gpa, p), a.m.StoreUint16(at, 3|uint16(a.now[at+1])<<8))
	default:
		return a.m.Write(gpa, p)
	}
}

// asBalloon discards pages, several at once if only the balloon uses them, or
// writes to them.
func (a *actor) asBalloon(page uint64) error {
	if a.r.IntN(3) == 0 {
		return a.asGuest(page)
	}
	end := page + 1
	if page >= balloonFirst && page < balloonEnd {
		n := []uint64{1, 3, blockPages, hugeSize / PageSize}[a.r.IntN(4)]
		page = max(page-page%n, balloonFirst)
		end = min(page+n, balloonEnd)
	}
	clear(a.now[page*PageSize : end*PageSize])
	return a.m.Discard(page*PageSize, (end-page)*PageSize)
}

// standStill runs do while no actor changes the memory.
func (g *stepGuest) standStill(do func() error) error {
	g.gate.Lock()
	defer g.gate.Unlock()
	return do()
}

// taken is a completed capture: the content of the memory at the instant, and the
// captured content.
type taken struct {
	was, got    []byte
	file        *os.File
	data, zeros []extent.Run
}

// capture goes through all steps.
func (g *stepGuest) capture(how stepHow) taken {
	t := g.t
	k := taken{file: newMemfd(t, nil)}
	cfg := CaptureConfig{Pagemap: openFile(t, "/proc/self/pagemap", os.O_RDONLY), File: k.file}
	if !how.still {
		cfg.Userfaultfd = openFile(t, "/dev/userfaultfd", os.O_RDWR)
	}
	open := newUserfaultfd
	if how.old {
		open = oldUserfaultfd
	}
	c := g.m.newCapture(cfg, open)
	c.cannotScan = how.old
	if how.hasty {
		c.lookLeft = 0
	}
	step := func(name string, do func() error) {
		t.Helper()
		if err := do(); err != nil {
			t.Fatalf("%s: %.200s", name, err)
		}
		how.at(name)
	}
	how.at("NewCapture")
	if c.Early() && !how.late {
		step("Announce", func() error { return g.standStill(c.Announce) })
		step("Arm", c.Arm)
	}
	list := func() (err error) {
		k.data, k.zeros, err = c.List(nil)
		return err
	}
	begin := func() error {
		k.was = bytes.Clone(g.now)
		err := c.Begin()
		if err == nil && how.still {
			err = errors.Join(list(), c.Copy(k.data))
		}
		return err
	}
	step("Begin", func() error { return g.standStill(begin) })
	if !how.still {
		step("List", list)
		// Copy, in parts.
		step("plan", func() error {
			c.runs = k.data
			defer c.plan()
			return k.file.Truncate(stepSize)
		})
		step("release", c.releaseUnplanned)
		step("Copy", func() error { return errors.Join(c.complete(), c.Err()) })
	}
	if how.share {
		step("Rebase", c.Rebase)
		step("Share", c.Share)
	}
	step("Close", c.Close)
	k.got = bytes.Clone(g.stack)
	for _, z := range k.zeros {
		clear(k.got[z.Start:z.End()])
	}
	for _, s := range k.data {
		if _, err := k.file.ReadAt(k.got[s.Start:s.End()], int64(s.Start)); err != nil {
			t.Fatal(err)
		}
	}
	return k
}

// oldUserfaultfd makes a userfaultfd as on kernels before Linux 6.4: it cannot protect
// absent anonymous pages.
func oldUserfaultfd(device *os.File) (userfaultfd, bool, error) {
	u, err := openUserfaultfd(device, 0)
	return u, false, err
}

// check compares a capture with its instant, and the memory with all writes and
// discards. No actor changes it meanwhile.
func (g *stepGuest) check(k taken, shared bool) {
	t := g.t
	t.Helper()
	if i := firstDifference(k.got, k.was); i >= 0 {
		t.Fatalf("page %d of the capture has %#x at %d, it was %#x", i/PageSize, k.got[i], i%PageSize, k.was[i])
	}
	got := make([]byte, stepSize)
	if err := g.m.Read(0, got); err != nil {
		t.Fatal(err)
	}
	if i := firstDifference(got, g.now); i >= 0 {
		t.Fatalf("page %d of the memory has %#x at %d, not %#x", i/PageSize, got[i], i%PageSize, g.now[i])
	}
	checkFilled(t, k.file, k.data)
	g.checkUnprotected()
	if shared {
		g.stack = k.was
	}
}

// checkUnprotected: a closed capture leaves neither protection nor markers.
func (g *stepGuest) checkUnprotected() {
	g.t.Helper()
	entry := make([]uint64, stepSize/PageSize)
	if err := readEntries(openFile(g.t, "/proc/self/pagemap", os.O_RDONLY), g.m.regions[0].bytes, entry); err != nil {
		g.t.Fatal(err)
	}
	for page, e := range entry {
		if e&pagemapProtected != 0 {
			g.t.Fatalf("page %d is still protected after the capture (entry %#x)", page, e)
		}
	}
}

// TestDiscardAtEachStep: a guest gives pages back at one moment of a capture. The
// capture does not fail, and holds the pages of the instant.
func TestDiscardAtEachStep(t *testing.T) {
	for _, step := range captureSteps {
		for _, n := range []uint64{PageSize, blockSize, hugeSize + 7*PageSize} {
			t.Run(fmt.Sprintf("%s/%dKiB", step, n>>10), func(t *testing.T) {
				g := newStepGuest(t, rand.New(rand.NewPCG(n, 1)), true)
				// Before that, one page is the process's own.
				if err := g.m.Write(9<<20, []byte{1}); err != nil {
					t.Fatal(err)
				}
				g.now[9<<20] = 1
				k := g.capture(stepHow{share: true, at: func(at string) {
					if at != step {
						return
					}
					clear(g.now[9<<20 : 9<<20+n])
					if err := g.m.Discard(9<<20, n); err != nil {
						t.Fatal(err)
					}
				}})
				g.check(k, true)
			})
		}
	}
}

// TestCaptureSteps: vCPU, device and balloon change the memory after each step of
// several captures.
func TestCaptureSteps(t *testing.T) {
	eachWay(t, 1, func(t *testing.T, how stepHow, r *rand.Rand, g *stepGuest) {
		change := func(string) {
			for range r.IntN(6) {
				if err := g.actors[r.IntN(len(g.actors))].act(); err != nil {
					t.Fatal(err)
				}
			}
		}
		how.at = change
		for range 4 {
			for range 5 {
				change("")
			}
			how.share = r.IntN(3) != 0
			g.check(g.capture(how), how.share)
		}
	})
}

// TestCaptureBeside: vCPU, device and balloon do not wait for steps; they stop only
// while the guest stands still.
func TestCaptureBeside(t *testing.T) {
	eachWay(t, 1, func(t *testing.T, how stepHow, r *rand.Rand, g *stepGuest) {
		how.at = func(string) {}
		for range 2 {
			how.share = r.IntN(3) != 0
			stop := make(chan struct{})
			var all sync.WaitGroup
			var changes atomic.Int64
			for _, a := range g.actors {
				all.Go(func() {
					for {
						select {
						case <-stop:
							return
						default:
						}
						if err := a.act(); err != nil {
							t.Error(err)
							return
						}
						changes.Add(1)
						giveWay() // otherwise the capture hardly gets a processor
					}
				})
			}
			k := g.capture(how)
			close(stop)
			all.Wait()
			t.Logf("%d changes", changes.Load())
			g.check(k, how.share)
		}
	})
}

// eachWay runs a test for RAM of both kinds, captured in all ways, with some seeds.
// In make soak it runs much longer.
func eachWay(t *testing.T, seeds uint64, test func(t *testing.T, how stepHow, r *rand.Rand, g *stepGuest)) {
	if soak.On() {
		seeds *= 50
	}
	for _, layered := range []bool{true, false} {
		for _, way := range []struct {
			name string
			how  stepHow
		}{
			{"early", stepHow{}}, {"late", stepHow{late: true}}, {"hasty", stepHow{hasty: true}},
			{"late and hasty", stepHow{late: true, hasty: true}}, {"still", stepHow{still: true}},
			{"old", stepHow{old: true}}, {"old and hasty", stepHow{old: true, hasty: true}}, {"old and late", stepHow{old: true, late: true}},
		} {
			for i := range seeds {
				t.Run(fmt.Sprintf("layered=%t/%s/%d", layered, way.name, i), func(t *testing.T) {
					seed := rand.Uint64()
					t.Logf("seed %d", seed)
					r := rand.New(rand.NewPCG(seed, 9))
					g := newStepGuest(t, r, layered)
					g.addActors(seed)
					test(t, way.how, r, g)
				})
			}
		}
	}
}
