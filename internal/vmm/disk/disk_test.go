package disk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/layer/layertest"
	"agentrun.dev/internal/vmm/guestmem"
)

const sector = 512

// guest is a memory with a scratch area, through which tests use disks as a
// device does.
type guest struct {
	t   *testing.T
	mem *guestmem.Memory
	r   *rand.Rand
}

func newGuest(t *testing.T, r *rand.Rand) guest {
	t.Helper()
	mem, err := guestmem.NewAnonymous(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mem.Close(); err != nil {
			t.Error(err)
		}
	})
	return guest{t, mem, r}
}

// scatter divides n bytes into ranges of odd lengths, some of them empty.
func (g guest) scatter(n int) []guestmem.Range {
	var list []guestmem.Range
	gpa := uint64(g.r.IntN(1000))
	for n > 0 {
		k := min(n, g.r.IntN(3*blockSize))
		list = append(list, guestmem.Range{GPA: gpa, Len: uint32(k)})
		gpa += uint64(k + g.r.IntN(64))
		n -= k
	}
	return list
}

func (g guest) read(d *Disk, off, n int) []byte {
	g.t.Helper()
	ranges := g.scatter(n)
	before := slices.Clone(ranges)
	if got, err := d.ReadAt(g.mem, ranges, int64(off)); err != nil || got != int64(n) {
		g.t.Fatalf("read %#x+%#x: %d, %v", off, n, got, err)
	}
	if !slices.Equal(ranges, before) {
		g.t.Fatal("the ranges were changed")
	}
	var out []byte
	for _, r := range ranges {
		p := make([]byte, r.Len)
		if err := g.mem.Read(r.GPA, p); err != nil {
			g.t.Fatal(err)
		}
		out = append(out, p...)
	}
	return out
}

func (g guest) write(d *Disk, off int, p []byte) {
	g.t.Helper()
	ranges := g.scatter(len(p))
	for rest, i := p, 0; i < len(ranges); i++ {
		if err := g.mem.Write(ranges[i].GPA, rest[:ranges[i].Len]); err != nil {
			g.t.Fatal(err)
		}
		rest = rest[ranges[i].Len:]
	}
	if got, err := d.WriteAt(g.mem, ranges, int64(off)); err != nil || got != int64(len(p)) {
		g.t.Fatalf("write %#x+%#x: %d, %v", off, len(p), got, err)
	}
}

// random makes one random request to disk and model.
func (g guest) random(d *Disk, model []byte) {
	g.t.Helper()
	sectors := len(model) / sector
	first := g.r.IntN(sectors)
	n := 1 + g.r.IntN(min(sectors-first, 60))
	off, end := first*sector, (first+n)*sector
	switch g.r.IntN(8) {
	case 0, 1, 2:
		p := make([]byte, end-off)
		for i := 0; i < len(p); i += 8 {
			binary.LittleEndian.PutUint64(p[i:], g.r.Uint64())
		}
		g.write(d, off, p)
		copy(model[off:], p)
	case 3:
		if err := d.Discard(int64(off), int64(end-off)); err != nil {
			g.t.Fatal(err)
		}
		clear(model[off:end])
	case 4:
		if err := d.WriteZeroes(int64(off), int64(end-off), g.r.IntN(2) == 0); err != nil {
			g.t.Fatal(err)
		}
		clear(model[off:end])
	default:
		layertest.SameBytes(g.t, "read", g.read(d, off, end-off), model[off:end])
	}
}

// newTop makes an empty file; /dev/shm and the temporary folder are usually on
// different file systems.
func newTop(t *testing.T, dir string) *os.File {
	t.Helper()
	f, err := os.CreateTemp(dir, "top-")
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func newDisk(s layertest.Store, stack layer.Stack, top *os.File) *Disk {
	s.Helper()
	d, err := New(stack, s.OpenAll(stack), top)
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { _ = d.Close() }) // some disks are closed earlier
	return d
}

// capture makes a snapshot of a disk.
func capture(s layertest.Store, d *Disk) layer.Stack {
	s.Helper()
	runs, zeros := d.Changed()
	if len(runs) > layer.MaxRuns || len(zeros) > layer.MaxRuns {
		s.Fatalf("%d runs, %d zeros", len(runs), len(zeros))
	}
	var union []extent.Run
	union = extent.Sort(append(append(union, runs...), zeros...))
	if err := extent.Check(union, d.below.Stack.Size, len(union)); err != nil {
		s.Fatalf("runs and zeros overlap: %v", err)
	}
	ref := s.Put(func(w *layer.Writer) {
		if err := d.WriteChanged(w, runs); err != nil {
			s.Fatal(err)
		}
	})
	stack, err := layer.Overlay(d.below.Stack, ref, runs, zeros)
	if errors.Is(err, layer.ErrNeedsCompaction) {
		base := layer.Stack{}
		s.Put(func(w *layer.Writer) {
			if base, err = layer.Compact(s.Context(), d.below.Stack, s.Open, w); err != nil {
				s.Fatal(err)
			}
		})
		stack, err = layer.Overlay(base, ref, runs, zeros)
	}
	if err != nil {
		s.Fatal(err)
	}
	return stack
}

// TestDiskModel compares generations of disks with byte slices, on tmpfs, on
// the file system of the temporary folder, and without holes.
func TestDiskModel(t *testing.T) {
	for _, c := range []struct {
		name    string
		dir     func(*testing.T) string
		noPunch bool
	}{
		{"tmpfs", layertest.Shm, false},
		{"temporary folder", (*testing.T).TempDir, false},
		{"no holes", layertest.Shm, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			for seed := range uint64(4) {
				g := newGuest(t, rand.New(rand.NewPCG(seed, 3)))
				s, dir := layertest.NewStore(t), c.dir(t)
				model := make([]byte, (40+g.r.IntN(900))*blockSize)
				stack := layer.Stack{Size: uint64(len(model))}
				var parent *Disk
				var old []byte
				for range 10 {
					d := newDisk(s, stack, newTop(t, dir))
					d.noPunch = c.noPunch
					for range 1 + g.r.IntN(250) {
						g.random(d, model)
					}
					if err := d.Flush(); err != nil {
						t.Fatal(err)
					}
					stack = capture(s, d)
					layertest.SameBytes(t, "snapshot", s.Content(stack), model)
					if parent != nil {
						layertest.SameBytes(t, "parent", hostRead(t, parent), old)
						if err := parent.Close(); err != nil {
							t.Fatal(err)
						}
					}
					layertest.SameBytes(t, "disk", hostRead(t, d), model)
					parent, old = d, slices.Clone(model)
				}
			}
		})
	}
}

func hostRead(t *testing.T, d *Disk) []byte {
	t.Helper()
	p := make([]byte, d.Size())
	if err := d.read(p, 0); err != nil {
		t.Fatal(err)
	}
	return p
}

// TestDiskChanged: zeros take no room in the layer.
func TestDiskChanged(t *testing.T) {
	g := newGuest(t, rand.New(rand.NewPCG(4, 4)))
	s := layertest.NewStore(t)
	l := pages(s, 20)
	stack := layer.Stack{Size: 100 * blockSize, Layers: []layer.Ref{l}, Extents: []layer.Extent{ext(10, 20)}}
	d := newDisk(s, stack, newTop(t, layertest.Shm(t)))
	if runs, zeros := d.Changed(); runs != nil || zeros != nil {
		t.Errorf("an untouched disk: %v, %v", runs, zeros)
	}
	if err := d.Discard(0, d.Size()); err != nil {
		t.Fatal(err)
	}
	g.write(d, 50*blockSize+sector, []byte{1, 2, 3})
	g.write(d, 15*blockSize, bytes.Repeat([]byte{1}, blockSize))
	runs, zeros := d.Changed()
	if want := []extent.Run{{Start: 15 * blockSize, Length: blockSize}, {Start: 50 * blockSize, Length: blockSize}}; !slices.Equal(runs, want) {
		t.Errorf("runs %v, want %v", runs, want)
	}
	if want := []extent.Run{{Start: 10 * blockSize, Length: 5 * blockSize}, {Start: 16 * blockSize, Length: 14 * blockSize}}; !slices.Equal(zeros, want) {
		t.Errorf("zeros %v, want %v", zeros, want)
	}
}

// TestDiskManyZeros makes more zero ranges than Changed can list.
func TestDiskManyZeros(t *testing.T) {
	const blocks = 6 * layer.MaxRuns
	s := layertest.NewStore(t)
	l := pages(s, blocks)
	stack := layer.Stack{Size: blocks * blockSize, Layers: []layer.Ref{l}, Extents: []layer.Extent{ext(0, blocks)}}
	d := newDisk(s, stack, newTop(t, layertest.Shm(t)))
	want := bytes.Repeat([]byte{9}, blocks*blockSize)
	for i := 0; i < blocks; i += 2 + i%3 {
		if err := d.Discard(int64(i)*blockSize, blockSize); err != nil {
			t.Fatal(err)
		}
		clear(want[i*blockSize : (i+1)*blockSize])
	}
	layertest.SameBytes(t, "snapshot", s.Content(capture(s, d)), want)
}

// TestHugeDisk: the bitmap of a huge disk takes little memory, even after the
// guest has discarded all of the disk.
func TestHugeDisk(t *testing.T) {
	s := layertest.NewStore(t)
	l := pages(s, 1)
	stack := layer.Stack{Size: 1 << 40, Layers: []layer.Ref{l}, Extents: []layer.Extent{{Start: 1<<40 - blockSize, Length: blockSize}}}
	d := newDisk(s, stack, newTop(t, layertest.Shm(t)))
	if err := d.Discard(sector, d.Size()-sector); err != nil {
		t.Fatal(err)
	}
	d.stages[0].present.set(5, stack.Size/blockSize) // as if the layers below had content
	chunks := 0
	for _, c := range d.stages[0].present.chunks {
		if c != nil && c != fullChunk {
			chunks++
		}
	}
	if chunks > 1 {
		t.Errorf("%d chunks of the bitmap are allocated", chunks)
	}
	runs, zeros := d.Changed()
	if len(runs) != 1 || runs[0] != (extent.Run{Start: 0, Length: blockSize}) || len(zeros) != 1 || zeros[0] != (extent.Run{Start: 1<<40 - blockSize, Length: blockSize}) {
		t.Errorf("runs %v, zeros %v", runs, zeros)
	}
}

func TestBitmap(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	const n = 3*chunkBlocks + 77
	b, model := newBitmap(n), make([]bool, n)
	for range 60 {
		first := r.IntN(n)
		end := first + 1 + r.IntN(min(n-first, 1+r.IntN(2*chunkBlocks)))
		b.set(uint64(first), uint64(end))
		for i := first; i < end; i++ {
			model[i] = true
		}
		for range 200 {
			from := r.IntN(n)
			to := from + r.IntN(n-from) + 1
			want := from
			for want < to && model[want] == model[from] {
				want++
			}
			in, next := b.span(uint64(from), uint64(to))
			if in != model[from] || next != uint64(want) || b.has(uint64(from)) != in {
				t.Fatalf("span of [%d, %d): %v to %d, want %v to %d", from, to, in, next, model[from], want)
			}
		}
	}
}

func TestReadOnlyDisk(t *testing.T) {
	g := newGuest(t, rand.New(rand.NewPCG(6, 6)))
	s := layertest.NewStore(t)
	l := pages(s, 2)
	d := newDisk(s, layer.Stack{Size: 4 * blockSize, Layers: []layer.Ref{l}, Extents: []layer.Extent{ext(1, 2)}}, nil)
	want := make([]byte, 4*blockSize)
	copy(want[blockSize:], bytes.Repeat([]byte{9}, 2*blockSize))
	layertest.SameBytes(t, "disk", g.read(d, 0, len(want)), want)
	if !d.ReadOnly() {
		t.Error("a disk without a top is writable")
	}
	_, err := d.WriteAt(g.mem, g.scatter(sector), 0)
	for _, err := range []error{err, d.Discard(0, sector), d.WriteZeroes(0, sector, true)} {
		layertest.WantError(t, err, "read-only")
	}
	if err := d.Flush(); err != nil {
		t.Error(err)
	}
	if runs, zeros := d.Changed(); runs != nil || zeros != nil {
		t.Errorf("changed: %v, %v", runs, zeros)
	}
}

func TestNewDiskRefuses(t *testing.T) {
	s, dir := layertest.NewStore(t), layertest.Shm(t)
	l := pages(s, 2)
	stack := layer.Stack{Size: 4 * blockSize, Layers: []layer.Ref{l}, Extents: []layer.Extent{ext(1, 2)}}
	top := newTop(t, dir)
	defer top.Close()
	short := pages(s, 1)
	if err := os.Rename(s.Path(short), s.Path(layertest.Ref(7, 1))); err != nil {
		t.Fatal(err)
	}
	open := func(flag int) *os.File {
		f, err := os.OpenFile(filepath.Join(dir, "other"), flag|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() }) // one file is closed on purpose
		return f
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	closed := open(os.O_RDWR)
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		stack layer.Stack
		files []*os.File
		top   *os.File
		say   string
	}{
		{"bad stack", layer.Stack{Size: 1}, nil, top, "stack of 1 bytes"},
		{"no files", stack, nil, top, "1 layers with 0 files"},
		{"a layer of another size", layer.Stack{Size: 8 * blockSize, Layers: []layer.Ref{layertest.Ref(7, 4)}, Extents: []layer.Extent{ext(0, 4)}}, s.OpenAll(layer.Stack{Layers: []layer.Ref{layertest.Ref(7, 4)}}), top, "has 4096 bytes"},
		{"a layer that is a device", stack, []*os.File{null}, top, os.DevNull},
		{"a closed layer", stack, []*os.File{closed}, top, l.Digest.String()},
		{"a device as top", stack, s.OpenAll(stack), null, "not a regular file"},
		{"a closed top", stack, s.OpenAll(stack), closed, "closed"},
		{"a top only to read", stack, s.OpenAll(stack), open(os.O_RDONLY), "reading and writing"},
		{"a top to append to", stack, s.OpenAll(stack), open(os.O_RDWR | os.O_APPEND), "at any place"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := New(c.stack, c.files, c.top)
			layertest.WantError(t, err, "make disk", c.say)
		})
	}
}

// TestDiskErrors: failures of the host reach the guest as errors, and
// half-written data is never read.
func TestDiskErrors(t *testing.T) {
	g := newGuest(t, rand.New(rand.NewPCG(7, 7)))
	s := layertest.NewStore(t)
	l := pages(s, 4)
	stack := layer.Stack{Size: 8 * blockSize, Layers: []layer.Ref{l}, Extents: []layer.Extent{ext(0, 4)}}
	d := newDisk(s, stack, newTop(t, layertest.Shm(t)))
	for _, r := range [][2]int64{{-sector, sector}, {0, d.Size() + sector}, {d.Size(), sector}, {sector, -sector}} {
		layertest.WantError(t, d.Discard(r[0], r[1]), "beyond the size")
	}
	layertest.WantError(t, d.WriteChanged(io.Discard, []extent.Run{{Start: 0, Length: 9 * blockSize}}), "beyond the size")
	outside := []guestmem.Range{{GPA: 0, Len: blockSize}, {GPA: 1 << 40, Len: blockSize}}
	if n, err := d.ReadAt(g.mem, []guestmem.Range{{GPA: 0, Len: sector}}, d.Size()); err == nil || n != 0 {
		t.Errorf("read behind the end: %d, %v", n, err)
	}
	if _, err := d.ReadAt(g.mem, outside, 4*blockSize); !errors.Is(err, guestmem.ErrRange) {
		t.Errorf("zeros to outside the memory: %v", err)
	}
	if _, err := d.WriteAt(g.mem, outside, 0); !errors.Is(err, guestmem.ErrRange) {
		t.Errorf("write from outside the memory: %v", err)
	}
	want := append(bytes.Repeat([]byte{9}, 4*blockSize), make([]byte, 4*blockSize)...)
	layertest.SameBytes(t, "after failed requests", hostRead(t, d), want)
	if err := d.Discard(blockSize, 0); err != nil {
		t.Error(err)
	}

	if err := os.Truncate(s.Path(l), blockSize); err != nil {
		t.Fatal(err)
	}
	if n, err := d.ReadAt(g.mem, g.scatter(4*blockSize), 0); n != blockSize {
		t.Errorf("read of a layer cut off: %d, %v", n, err)
	}
	layertest.WantError(t, d.Discard(3*blockSize+sector, sector), "copy up", l.Digest.String())
	layertest.WantError(t, d.Discard(3*blockSize-sector, sector), "copy up", l.Digest.String())
	layertest.WantError(t, d.WriteChanged(io.Discard, []extent.Run{{Start: 0, Length: 4 * blockSize}}), "unexpected EOF")

	// Writes to the top fail from here on.
	if err := d.stages[0].file.Close(); err != nil {
		t.Fatal(err)
	}
	d.stages[0].fd = -1
	d.stages[0].present.set(6, 7)
	layertest.WantError(t, d.Discard(sector, sector), "copy up", "closed")
	layertest.WantError(t, d.Discard(5*blockSize, blockSize), "punch hole")
	layertest.WantError(t, d.Discard(6*blockSize, sector), "write zeros")
	layertest.WantError(t, d.Discard(7*blockSize-sector, sector), "write zeros")
	d.noPunch = true
	layertest.WantError(t, d.Discard(6*blockSize, blockSize), "write zeros")
	layertest.WantError(t, d.WriteChanged(io.Discard, []extent.Run{{Start: 6 * blockSize, Length: blockSize}}), "read disk")
	if err := d.Flush(); err == nil {
		t.Error("flushed a closed file")
	}
	if runs, _ := d.Changed(); !slices.Equal(runs, []extent.Run{{Start: 6 * blockSize, Length: blockSize}}) {
		t.Errorf("unknown content is data: %v", runs)
	}
}
