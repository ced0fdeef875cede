package guestmem

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/test/soak"
	"golang.org/x/sys/unix"
)

func openFile(t *testing.T, path string, flags int) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, flags, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func newMemfd(t *testing.T, content []byte) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("layer", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "layer")
	t.Cleanup(func() { _ = f.Close() })
	if _, err := f.WriteAt(content, 0); err != nil {
		t.Fatal(err)
	}
	return f
}

// guestWrite writes as a vCPU does: the fault is taken inside a system call.
func guestWrite(t *testing.T, m *Memory, from *os.File, gpa uint64, p []byte) {
	t.Helper()
	b, err := m.slice(gpa, uint64(len(p)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := from.WriteAt(p, 0); err != nil {
		t.Fatal(err)
	}
	for len(b) > 0 {
		n, err := unix.Pread(int(from.Fd()), b, int64(len(p)-len(b)))
		if err != nil {
			t.Fatalf("a guest's write: %v", err)
		}
		b = b[n:]
	}
}

// captureModel is a memory, its expected content and the content of its stack.
type captureModel struct {
	t          *testing.T
	r          *rand.Rand
	m          *Memory
	now, stack []byte
	scratch    *os.File
	old        bool // as on kernels before Linux 6.4
}

// change writes to a random place, as the guest or as the host.
func (c *captureModel) change() {
	size := uint64(len(c.now))
	at := c.r.Uint64N(size)
	n := min(c.r.Uint64N(3*PageSize)+1, size-at)
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(c.r.Uint32())
	}
	var err error
	switch c.r.IntN(9) {
	case 0:
		clear(p)
		err = c.m.Zero(at, n)
	case 1, 2:
		err = c.m.Write(at, p)
	case 3:
		at &^= 1
		p = []byte{p[0], 7}
		err = c.m.StoreUint16(at, uint16(p[0])|7<<8)
	case 4:
		at, n = at&^(PageSize-1), PageSize*min(1+c.r.Uint64N(40), (size-at&^(PageSize-1))/PageSize)
		p = make([]byte, n)
		err = c.m.Discard(at, n)
	case 5:
		if _, err = c.scratch.WriteAt(p, 0); err == nil {
			_, err = c.m.ReadFile(int(c.scratch.Fd()), 0, []Range{{at, uint32(n)}})
		}
	case 6:
		if _, err = c.scratch.WriteAt(p, 0); err == nil {
			_, err = c.scratch.Seek(1, 0)
		}
		if p = p[min(n, 2):]; err == nil { // the first byte is not part of the message, the second is its head
			_, err = c.m.ReadMessage(int(c.scratch.Fd()), make([]byte, 1), []Range{{at, uint32(len(p))}})
		}
	default:
		guestWrite(c.t, c.m, c.scratch, at, p)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	copy(c.now[at:], p)
}

// TestCaptureModel: for any writes of guest and host before, during and after a capture,
// the capture holds the memory of its instant, and the memory loses no write. It runs
// with and without sharing, arming, time to look in the pause and userfaultfd.
func TestCaptureModel(t *testing.T) {
	for _, how := range []struct {
		name               string
		late, hasty, still bool
	}{{name: "early"}, {name: "old"}, {name: "late", late: true}, {name: "hasty", hasty: true}, {name: "late and hasty", late: true, hasty: true}, {name: "still", still: true}} {
		t.Run(how.name, func(t *testing.T) {
			for seed := range soak.Count(8, 2) {
				c := newCaptureModel(t, uint64(seed))
				for round := range 12 {
					c.old = how.name == "old"
					c.round(round, how.late, how.hasty, how.still)
				}
				if err := c.m.Close(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

func newCaptureModel(t *testing.T, seed uint64) *captureModel {
	const size = 8<<20 + 5*PageSize // the second half is empty; the last block is partial
	c := &captureModel{t: t, r: rand.New(rand.NewPCG(seed, 1)), now: make([]byte, size), scratch: newMemfd(t, nil)}
	base := make([]byte, 2<<20)
	for i := range base {
		base[i] = byte(c.r.Uint32())
	}
	file := newMemfd(t, base)
	mappings := []Mapping{
		{extent.Run{Start: 3 * PageSize, Length: 256 << 10}, file, 0},
		{extent.Run{Start: 1 << 20, Length: 64 << 10}, file, 1 << 20},
		{extent.Run{Start: 1<<20 + 64<<10, Length: 9 * PageSize}, file, 512 << 10},
		{extent.Run{Start: 3 << 20, Length: 1 << 20}, file, 1 << 20},
	}
	for _, m := range mappings {
		copy(c.now[m.Start:m.End()], base[m.Offset:])
	}
	c.stack = bytes.Clone(c.now)
	var err error
	if c.m, err = NewLayered(size, mappings); err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *captureModel) round(round int, late, hasty, still bool) {
	t := c.t
	for range 10 {
		c.change()
	}
	cfg := CaptureConfig{Pagemap: openFile(t, "/proc/self/pagemap", os.O_RDONLY), File: newMemfd(t, nil)}
	if !still {
		cfg.Userfaultfd = openFile(t, "/dev/userfaultfd", os.O_RDWR)
	}
	cap := c.m.NewCapture(cfg)
	if c.old {
		if err := cap.Close(); err != nil {
			t.Fatal(err)
		}
		cap = c.m.newCapture(cfg, oldUserfaultfd)
	}
	if hasty {
		cap.lookLeft = 0
	}
	if ok, why := cap.Beside(); ok == still {
		t.Fatal(ok, why)
	}
	if cap.Early() && !late {
		if err := cap.Announce(); err != nil {
			t.Fatal(err)
		}
		if err := cap.Arm(); err != nil {
			t.Fatal(err)
		}
		for range 5 {
			c.change()
		}
	}
	if err := cap.Begin(); err != nil {
		t.Fatal(err)
	}
	was := bytes.Clone(c.now)
	during := func() {
		for range c.r.IntN(6) {
			if !still {
				c.change()
			}
		}
	}
	during()
	var include []extent.Run
	if c.r.IntN(3) == 0 {
		include = []extent.Run{{Start: c.r.Uint64N(200) * PageSize, Length: 64 * PageSize}}
	}
	data, zeros, err := cap.List(include)
	if err != nil {
		t.Fatal(err)
	}
	during()
	runs := joined(data, c.r.Uint64N(6)*PageSize)
	if err := cap.Copy(runs); err != nil {
		t.Fatal(err)
	}
	during()
	share := c.r.IntN(2) == 0
	if share {
		if err := cap.Rebase(); err != nil {
			t.Fatal(err)
		}
		during()
		if err := cap.Share(); err != nil {
			t.Fatal(err)
		}
	}
	during()
	if err := cap.Close(); err != nil {
		t.Fatal(err)
	}
	during()

	child := bytes.Clone(c.stack)
	for _, z := range zeros {
		clear(child[z.Start:z.End()])
	}
	for _, s := range runs {
		if _, err := cfg.File.ReadAt(child[s.Start:s.End()], int64(s.Start)); err != nil {
			t.Fatal(err)
		}
	}
	if i := firstDifference(child, was); i >= 0 {
		t.Fatalf("round %d: page %d of the capture (include %v, shared %v) is not what it was", round, i/PageSize, include, share)
	}
	if share {
		c.stack = child
	}
	got := make([]byte, len(c.now))
	if err := c.m.Read(0, got); err != nil {
		t.Fatal(err)
	}
	if i := firstDifference(got, c.now); i >= 0 {
		t.Fatalf("round %d: page %d of the memory is not what was written", round, i/PageSize)
	}
	checkFilled(t, cfg.File, runs)
}

// joined closes small gaps.
func joined(runs []extent.Run, gap uint64) []extent.Run {
	var out []extent.Run
	for _, s := range runs {
		if n := len(out); n > 0 && s.Start-out[n-1].End() <= gap {
			out[n-1].Length = s.End() - out[n-1].Start
			continue
		}
		out = append(out, s)
	}
	return out
}

func firstDifference(a, b []byte) int {
	if bytes.Equal(a, b) { // in one step: the race detector checks each access of the loop
		return -1
	}
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

// checkFilled: a layer holds exactly its runs. The first reader would fill a hole,
// and pages outside of the runs cost memory. Allocated pages that were not written
// count as filled, although SEEK_DATA skips them.
func checkFilled(t *testing.T, f *os.File, runs []extent.Run) {
	t.Helper()
	var got []extent.Run
	for at := int64(0); ; {
		start, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		end, err := unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, extent.Run{Start: uint64(start), Length: uint64(end - start)})
		at = end
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	filled := uint64(0)
	for _, s := range runs {
		filled += s.Length
	}
	if want := joined(runs, 0); !slices.Equal(extent.Unite(got, want), want) || uint64(st.Blocks)*512 != filled {
		t.Errorf("the layer's file has %v and %d bytes, it was to have %v", got, st.Blocks*512, want)
	}
}

// TestCaptureRefuses: a second capture at the same time is refused. A file
// system that cannot be protected is copied while the guest stands still.
func TestCaptureRefuses(t *testing.T) {
	pagemap, uffd := openFile(t, "/proc/self/pagemap", os.O_RDONLY), openFile(t, "/dev/userfaultfd", os.O_RDWR)
	m, err := NewAnonymous(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	first := m.NewCapture(CaptureConfig{Userfaultfd: uffd, Pagemap: pagemap, File: newMemfd(t, nil)})
	if err := first.Begin(); err != nil {
		t.Fatal(err)
	}
	second := m.NewCapture(CaptureConfig{Userfaultfd: uffd, Pagemap: pagemap, File: newMemfd(t, nil)})
	if ok, why := second.Beside(); ok || why == nil {
		t.Errorf("a memory is protected twice at once: %v, %v", ok, why)
	}
	if err := errors.Join(second.Close(), first.Close()); err != nil {
		t.Error(err)
	}
	third := m.NewCapture(CaptureConfig{Userfaultfd: newMemfd(t, nil), Pagemap: pagemap, File: newMemfd(t, nil)})
	if ok, why := third.Beside(); ok || why == nil {
		t.Errorf("a file that is no userfaultfd protects: %v, %v", ok, why)
	}
	if err := third.Close(); err != nil {
		t.Error(err)
	}
}

func TestLayout(t *testing.T) {
	text := func(l layout) string {
		s := ""
		for _, p := range l {
			s += fmt.Sprintf("%d-%d:%d ", p.Start, p.End(), p.source)
		}
		return s
	}
	l := layout{{extent.Run{Start: 0, Length: 100}, 0}}
	for _, step := range []struct {
		at     extent.Run
		source int
		want   string
	}{
		{extent.Run{Start: 10, Length: 20}, 1, "0-10:0 10-30:1 30-100:0 "},
		{extent.Run{Start: 20, Length: 5}, 2, "0-10:0 10-20:1 20-25:2 25-30:1 30-100:0 "},
		{extent.Run{Start: 25, Length: 15}, 2, "0-10:0 10-20:1 20-40:2 40-100:0 "},
		{extent.Run{Start: 0, Length: 10}, 0, "0-10:0 10-20:1 20-40:2 40-100:0 "},
		{extent.Run{Start: 5, Length: 95}, 3, "0-5:0 5-100:3 "},
		{extent.Run{Start: 0, Length: 100}, 4, "0-100:4 "},
	} {
		l.place(step.at, step.source)
		if got := text(l); got != step.want {
			t.Fatalf("after %v: %s, not %s", step.at, got, step.want)
		}
	}
	l.place(extent.Run{Start: 50, Length: 10}, 0)
	if got := text(l.within(extent.Run{Start: 45, Length: 10})); got != "45-50:4 50-55:0 " {
		t.Error(got)
	}
	if got := l.without([]extent.Run{{Start: 0, Length: 52}, {Start: 55, Length: 20}}); !slices.Equal(got, []extent.Run{{Start: 50, Length: 2}, {Start: 55, Length: 5}}) {
		t.Error(got)
	}
}

// TestPromptServer: the thread that answers the guest's writes has short time
// slices, if the kernel has slices of different lengths.
func TestPromptServer(t *testing.T) {
	own, err := unix.SchedGetAttr(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	shorter := func() (n int) {
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		for _, task := range tasks {
			tid, err := strconv.Atoi(task.Name())
			if err != nil {
				t.Fatal(err)
			}
			if a, err := unix.SchedGetAttr(tid, 0); err == nil && a.Runtime < own.Runtime { // the thread may have ended
				n++
			}
		}
		return n
	}
	m, scratch := newMemory(t, 4*blockSize), newMemfd(t, nil)
	guestWrite(t, m, scratch, 0, []byte{1})
	c := m.NewCapture(CaptureConfig{
		Userfaultfd: openFile(t, "/dev/userfaultfd", os.O_RDWR), Pagemap: openFile(t, "/proc/self/pagemap", os.O_RDONLY), File: newMemfd(t, nil),
	})
	defer func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}()
	if err := c.Begin(); err != nil {
		t.Fatal(err)
	}
	guestWrite(t, m, scratch, 0, []byte{2}) // the write returns once it was answered
	if shorter() == 0 && own.Runtime != 0 {
		t.Error("no thread has short slices")
	}
}

// TestWrittenEmptyPage: a page in the middle of the layer's runs was absent at the
// instant. A write to it afterwards goes unnoticed, so Share must not replace it.
func TestWrittenEmptyPage(t *testing.T) {
	pagemap, uffd := openFile(t, "/proc/self/pagemap", os.O_RDONLY), openFile(t, "/dev/userfaultfd", os.O_RDWR)
	const pages, empty = 64, 21
	m, scratch, file := newMemory(t, pages*PageSize), newMemfd(t, nil), newMemfd(t, nil)
	// Small pages: a huge one has no empty parts.
	_ = unix.Madvise(m.regions[0].bytes, unix.MADV_NOHUGEPAGE)
	for p := uint64(0); p < pages; p++ {
		if p != empty {
			guestWrite(t, m, scratch, p*PageSize, []byte{1})
		}
	}
	c := m.NewCapture(CaptureConfig{Userfaultfd: uffd, Pagemap: pagemap, File: file})
	if err := c.Begin(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.List(nil); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.Copy([]extent.Run{{Start: 0, Length: pages * PageSize}}), c.Rebase()); err != nil {
		t.Fatal(err)
	}
	guestWrite(t, m, scratch, empty*PageSize, []byte{2})
	if err := errors.Join(c.Share(), c.Close()); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 1)
	for p := uint64(0); p < pages; p++ {
		want := byte(1)
		if p == empty {
			want = 2
		}
		if err := m.Read(p*PageSize, got); err != nil || got[0] != want {
			t.Errorf("page %d begins with %d, not %d (%v)", p, got[0], want, err)
		}
		if p == empty {
			want = 0
		}
		if _, err := file.ReadAt(got, int64(p*PageSize)); err != nil || got[0] != want {
			t.Errorf("page %d of the layer begins with %d, not %d (%v)", p, got[0], want, err)
		}
	}
}
