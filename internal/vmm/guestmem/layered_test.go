package guestmem

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"agentrun.dev/internal/storage/extent"
)

// layerFile makes a file of n pages, page i filled with byte i+1.
func layerFile(t *testing.T, n int) *os.File {
	t.Helper()
	var b []byte
	for i := range n {
		b = append(b, bytes.Repeat([]byte{byte(i + 1)}, PageSize)...)
	}
	return tempFile(t, b)
}

func pagemap(t *testing.T) *os.File {
	t.Helper()
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func layered(t *testing.T, size uint64, mappings ...Mapping) *Memory {
	t.Helper()
	m, err := NewLayered(size, mappings)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func run(page, pages uint64) extent.Run {
	return extent.Run{Start: page * PageSize, Length: pages * PageSize}
}

func TestLayeredRefuses(t *testing.T) {
	f := layerFile(t, 4)
	for name, maps := range map[string][]Mapping{
		"beyond the end": {{Run: run(7, 2), File: f}},
		"far beyond":     {{Run: extent.Run{Start: 1 << 62, Length: PageSize}, File: f}},
		"length wraps":   {{Run: extent.Run{Start: PageSize, Length: ^uint64(PageSize - 1)}, File: f}},
		"start odd":      {{Run: extent.Run{Start: 1, Length: PageSize}, File: f}},
		"length odd":     {{Run: extent.Run{Start: 0, Length: PageSize + 1}, File: f}},
		"offset odd":     {{Run: run(0, 1), File: f, Offset: 1}},
		"offset huge":    {{Run: run(0, 1), File: f, Offset: 1 << 63}},
		"empty":          {{Run: run(1, 0), File: f}},
		"overlap":        {{Run: run(1, 2), File: f}, {Run: run(2, 1), File: f}},
		"not in order":   {{Run: run(3, 1), File: f}, {Run: run(1, 1), File: f}},
	} {
		if m, err := NewLayered(8*PageSize, maps); err == nil {
			_ = m.Close()
			t.Errorf("%s: accepted", name)
		}
	}
}

// TestLayeredAroundTheGap: a mapping may lie on both sides of the gap.
func TestLayeredAroundTheGap(t *testing.T) {
	m := layered(t, bigSize, Mapping{Run: extent.Run{Start: GapStart - PageSize, Length: 3 * PageSize}, File: layerFile(t, 4), Offset: PageSize})
	for gpa, want := range map[uint64]byte{GapStart - 1: 2, GapEnd: 3, GapEnd + PageSize: 4, GapEnd + 2*PageSize: 0, GapStart - PageSize - 1: 0} {
		got := make([]byte, 1)
		if err := m.Read(gpa, got); err != nil || got[0] != want {
			t.Errorf("%#x holds %d, not %d (%v)", gpa, got[0], want, err)
		}
	}
	if err := m.Discard(GapEnd, PageSize); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, PageSize)
	if err := m.Read(GapEnd, got); err != nil || !bytes.Equal(got, make([]byte, PageSize)) {
		t.Errorf("a discarded page above the gap holds %d (%v)", got[0], err)
	}
}

// TestLayeredIsPrivate: writes reach neither the file nor another memory.
func TestLayeredIsPrivate(t *testing.T) {
	f := layerFile(t, 4)
	a := layered(t, 8*PageSize, Mapping{Run: run(1, 4), File: f})
	b := layered(t, 8*PageSize, Mapping{Run: run(1, 4), File: f})
	if err := a.Write(PageSize, []byte("mine")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 4)
	if err := b.Read(PageSize, got); err != nil || string(got) != "\x01\x01\x01\x01" {
		t.Errorf("the other memory holds %q (%v)", got, err)
	}
	if _, err := f.ReadAt(got, 0); err != nil || string(got) != "\x01\x01\x01\x01" {
		t.Errorf("the file holds %q (%v)", got, err)
	}
}

// TestLayeredAgainstModel compares random writes and discards, more of them than
// there may be mappings for, with plain bytes. The pages that Changed lists, laid
// over the layer, restore the memory.
func TestLayeredAgainstModel(t *testing.T) {
	const pages = 4096
	f := layerFile(t, 200)
	maps := []Mapping{{Run: run(10, 200), File: f}, {Run: run(1000, 100), File: f, Offset: 50 * PageSize}, {Run: run(2000, 1), File: f}}
	base := make([]byte, pages*PageSize)
	for _, p := range maps {
		if _, err := f.ReadAt(base[p.Start:p.Start+p.Length], int64(p.Offset)); err != nil {
			t.Fatal(err)
		}
	}
	for seed := range uint64(4) {
		r := rand.New(rand.NewPCG(seed, 1))
		m := layered(t, pages*PageSize, maps...)
		model := bytes.Clone(base)
		for range 1200 {
			page, n := r.Uint64N(2100), 1+r.Uint64N(3)
			at := page * PageSize
			switch r.IntN(3) {
			case 0:
				if err := m.Discard(at, n*PageSize); err != nil {
					t.Fatal(err)
				}
				clear(model[at : at+n*PageSize])
			case 1:
				p := []byte{byte(r.Uint32()), 0, byte(seed)}
				if err := m.Write(at+100, p); err != nil {
					t.Fatal(err)
				}
				copy(model[at+100:], p)
			case 2: // a read alone changes no page
				if err := m.Read(at, make([]byte, n*PageSize)); err != nil {
					t.Fatal(err)
				}
			}
		}
		got := make([]byte, len(model))
		if err := m.Read(0, got); err != nil || !bytes.Equal(got, model) {
			t.Fatalf("seed %d: memory differs from the model (%v)", seed, err)
		}
		data, zeros, err := m.Changed(pagemap(t))
		if err != nil {
			t.Fatal(err)
		}
		again := bytes.Clone(base)
		for _, z := range zeros {
			clear(again[z.Start:z.End()])
		}
		var out bytes.Buffer
		if err := m.WriteRuns(&out, data); err != nil {
			t.Fatal(err)
		}
		for _, d := range data {
			copy(again[d.Start:d.End()], out.Next(int(d.Length)))
		}
		if !bytes.Equal(again, model) {
			t.Fatalf("seed %d: layer and changes do not give the memory", seed)
		}
		var listed uint64
		for _, s := range append(data, zeros...) {
			listed += s.Length
		}
		if listed > 1600*PageSize { // of 1200 changes, without pages that were only read
			t.Errorf("seed %d: %d pages are listed as changed", seed, listed/PageSize)
		}
	}
}

func TestWriteRunsChecks(t *testing.T) {
	m := layered(t, 4*PageSize)
	for _, s := range []extent.Run{run(4, 1), run(3, 2), {Start: 1 << 63, Length: PageSize}, {Start: 0, Length: 1 << 63}} {
		if err := m.WriteRuns(&bytes.Buffer{}, []extent.Run{s}); !errors.Is(err, ErrRange) {
			t.Errorf("%+v: %v", s, err)
		}
	}
}

// TestPopulate: Populate makes pages the process's own before they are written.
// They have the content of their file, and Touched lists them.
func TestPopulate(t *testing.T) {
	f := layerFile(t, 16)
	m := layered(t, 64*PageSize, Mapping{Run: run(8, 16), File: f})
	pages := pagemap(t)
	if own, read, err := m.Touched(pages); err != nil || len(own) != 0 || len(read) != 0 {
		t.Fatalf("at first own %v, read %v, %v", own, read, err)
	}
	want := []extent.Run{run(9, 2), run(40, 1)}
	m.Populate(append(want, run(1<<28, 1), run(63, 2))) // the last two are outside of RAM
	own, _, err := m.Touched(pages)
	if err != nil || !slices.Equal(own, want) {
		t.Fatalf("own %v, %v, want %v", own, err, want)
	}
	got, below := make([]byte, PageSize), make([]byte, PageSize)
	if err := m.Read(9*PageSize, got); err != nil {
		t.Fatal(err)
	}
	if _, err := f.ReadAt(below, PageSize); err != nil || !bytes.Equal(got, below) {
		t.Fatalf("a populated page is not what its file has (%v)", err)
	}
}

// TestWatch: pages that were read are listed one by one, and only once. After a
// capture has begun they are not listed, and the capture works as usual.
func TestWatch(t *testing.T) {
	f := newMemfd(t, bytes.Repeat([]byte{7}, 64*PageSize))
	m := layered(t, 128*PageSize, Mapping{Run: run(32, 64), File: f})
	pages, device := pagemap(t), openFile(t, "/dev/userfaultfd", os.O_RDWR)
	touch := func() {
		t.Helper()
		for _, page := range []uint64{40, 60, 61} {
			if err := m.Read(page*PageSize, make([]byte, 8)); err != nil {
				t.Fatal(err)
			}
		}
		if err := m.Write(50*PageSize, []byte("mine")); err != nil {
			t.Fatal(err)
		}
	}
	m.Watch(device)
	touch()
	own, read, err := m.Touched(pages)
	if want := []extent.Run{run(40, 1), run(60, 2)}; err != nil || !slices.Equal(read, want) || !slices.Equal(own, []extent.Run{run(50, 1)}) {
		t.Fatalf("own %v, read %v, want %v, %v", own, read, want, err)
	}
	if _, read, err := m.Touched(pages); err != nil || len(read) != 0 {
		t.Errorf("asked again: %v, %v", read, err)
	}
	m.Watch(device)
	c := m.NewCapture(CaptureConfig{Userfaultfd: device, Pagemap: pages, File: newMemfd(t, nil)})
	if beside, why := c.Beside(); !beside {
		t.Errorf("nothing can be captured beside the guest: %v", why)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if _, read, err := m.Touched(pages); err != nil || len(read) != 0 {
		t.Errorf("read %v of memory that nobody watches, %v", read, err)
	}
	m.Watch(openFile(t, os.DevNull, os.O_RDWR)) // this device does not work
	if _, read, err := m.Touched(pages); err != nil || len(read) != 0 {
		t.Errorf("read %v of memory that cannot be watched, %v", read, err)
	}
}
