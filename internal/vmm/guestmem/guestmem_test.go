package guestmem

import (
	"bytes"
	"errors"
	"math"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func newMemory(t testing.TB, size uint64) *Memory {
	t.Helper()
	m, err := NewAnonymous(size)
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

func TestNewAnonymousRefuses(t *testing.T) {
	for _, size := range []uint64{0, 1, PageSize + 1, MaxSize + PageSize, math.MaxUint64} {
		if m, err := NewAnonymous(size); err == nil {
			m.Close()
			t.Errorf("%d bytes were accepted", size)
		}
	}
}

// bigSize is RAM on both sides of the gap; the tests touch very little of it.
const bigSize = GapStart + 4*PageSize

func TestLayoutAroundTheGap(t *testing.T) {
	small := newMemory(t, PageSize)
	if r := small.Regions(); len(r) != 1 || r[0].GPA != 0 || r[0].Size() != PageSize || r[0].HostAddr() == 0 {
		t.Fatalf("regions %+v", r)
	}
	full := newMemory(t, GapStart)
	if r := full.Regions(); len(r) != 1 || r[0].Size() != GapStart {
		t.Fatalf("%d regions", len(r))
	}
	big := newMemory(t, bigSize)
	r := big.Regions()
	if len(r) != 2 || r[1].GPA != GapEnd || r[1].Size() != 4*PageSize || big.Size() != bigSize {
		t.Fatalf("%d regions", len(r))
	}
	// The two pieces do not overlap.
	for _, gpa := range []uint64{GapStart - 8, GapEnd, GapEnd + 4*PageSize - 8} {
		want := []byte{byte(gpa >> 32), 2, 3, 4, 5, 6, 7, byte(gpa)}
		got := make([]byte, 8)
		if err := errors.Join(big.Write(gpa, want), big.Read(gpa, got)); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%#x: %x, %v", gpa, got, err)
		}
	}
}

// badRanges are not completely inside bigSize bytes of RAM.
var badRanges = map[string]struct{ gpa, n uint64 }{
	"in the gap":            {GapStart, 1},
	"gap, page":             {0xD000_0000, PageSize},
	"into the gap":          {GapStart - 1, 2},
	"out of the gap":        {GapEnd - 1, 2},
	"across the gap":        {GapStart - PageSize, GapEnd - GapStart + 2*PageSize},
	"at the end":            {GapEnd + 4*PageSize, 1},
	"over the end":          {GapEnd + 4*PageSize - 1, 2},
	"far beyond":            {1 << 62, 1},
	"address wraps":         {math.MaxUint64, 2},
	"length wraps":          {PageSize, math.MaxUint64},
	"sum wraps":             {math.MaxUint64 - PageSize, 2 * PageSize},
	"empty, in the gap":     {GapStart + 1, 0},
	"empty, beyond the end": {math.MaxUint64, 0},
}

func TestRangeChecks(t *testing.T) {
	m := newMemory(t, bigSize)
	for name, r := range badRanges {
		t.Run(name, func(t *testing.T) {
			if m.Contains(r.gpa, r.n) {
				t.Error("Contains")
			}
			if err := m.Zero(r.gpa, r.n); !errors.Is(err, ErrRange) {
				t.Errorf("Zero: %v", err)
			}
			if err := m.Discard(r.gpa, r.n); !errors.Is(err, ErrRange) {
				t.Errorf("Discard: %v", err)
			}
			if r.n > 2*PageSize {
				return
			}
			if err := m.Read(r.gpa, make([]byte, r.n)); !errors.Is(err, ErrRange) {
				t.Errorf("Read: %v", err)
			}
			if err := m.Write(r.gpa, make([]byte, r.n)); !errors.Is(err, ErrRange) {
				t.Errorf("Write: %v", err)
			}
		})
	}
	for name, r := range map[string]struct{ gpa, n uint64 }{
		"all of low RAM":  {0, GapStart},
		"all of high RAM": {GapEnd, 4 * PageSize},
		"last byte":       {GapEnd + 4*PageSize - 1, 1},
		"empty":           {0, 0},
		"empty, at end":   {GapStart, 0},
	} {
		if !m.Contains(r.gpa, r.n) {
			t.Errorf("%s: not contained", name)
		}
	}
}

// TestNothingIsTouchedOnError: the whole range is checked before a byte is
// copied.
func TestNothingIsTouchedOnError(t *testing.T) {
	m := newMemory(t, PageSize)
	if err := m.Write(PageSize-4, []byte("abcdefgh")); !errors.Is(err, ErrRange) {
		t.Fatal(err)
	}
	got := []byte("xxxx")
	if err := m.Read(PageSize-4, got); err != nil || !bytes.Equal(got, make([]byte, 4)) {
		t.Fatalf("memory holds %q (%v)", got, err)
	}
	long := []byte("xxxxxxxx")
	if err := m.Read(PageSize-4, long); !errors.Is(err, ErrRange) || string(long) != "xxxxxxxx" {
		t.Fatalf("buffer holds %q (%v)", long, err)
	}
}

func TestZero(t *testing.T) {
	m := newMemory(t, PageSize)
	got := make([]byte, 6)
	if err := errors.Join(m.Write(10, []byte("abcdef")), m.Zero(11, 4), m.Read(10, got)); err != nil || string(got) != "a\x00\x00\x00\x00f" {
		t.Fatalf("%q, %v", got, err)
	}
}

func TestUint16(t *testing.T) {
	m := newMemory(t, PageSize)
	if err := m.StoreUint16(PageSize-2, 0x1234); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 2)
	if err := m.Read(PageSize-2, b); err != nil || b[0] != 0x34 || b[1] != 0x12 {
		t.Fatalf("bytes %x, %v: not little-endian", b, err)
	}
	if v, err := m.LoadUint16(PageSize - 2); err != nil || v != 0x1234 {
		t.Fatalf("%#x, %v", v, err)
	}
	// Neighbours stay as they are.
	if err := errors.Join(m.Write(100, []byte{1, 2, 3, 4, 5, 6}), m.StoreUint16(102, 0xffff)); err != nil {
		t.Fatal(err)
	}
	six := make([]byte, 6)
	if err := m.Read(100, six); err != nil || !bytes.Equal(six, []byte{1, 2, 255, 255, 5, 6}) {
		t.Fatalf("%x, %v", six, err)
	}
	for _, gpa := range []uint64{1, PageSize, PageSize - 1, math.MaxUint64, math.MaxUint64 - 1} {
		if _, err := m.LoadUint16(gpa); !errors.Is(err, ErrRange) {
			t.Errorf("load %#x: %v", gpa, err)
		}
		if err := m.StoreUint16(gpa, 1); !errors.Is(err, ErrRange) {
			t.Errorf("store %#x: %v", gpa, err)
		}
	}
}

// TestUint16Publishes: a reader that sees an index sees all writes made before
// it.
func TestUint16Publishes(t *testing.T) {
	m := newMemory(t, PageSize)
	const rounds = 20000
	slot := func(i uint16) uint64 { return 64 + 2*uint64(i%8) }
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := uint16(1); i <= rounds; i++ {
			_ = m.Write(slot(i), []byte{byte(i), byte(i >> 8)}) // inside
			_ = m.StoreUint16(0, i)
		}
	})
	for seen := uint16(0); seen < rounds; {
		i, err := m.LoadUint16(0)
		if err != nil {
			t.Fatal(err)
		}
		if i < seen {
			t.Fatalf("index went back from %d to %d", seen, i)
		}
		if i > 0 {
			// The writer may be some rounds ahead in this slot, but never
			// behind.
			if got, err := m.LoadUint16(slot(i)); err != nil || got < i {
				t.Fatalf("index %d published before its data (%d), %v", i, got, err)
			}
		}
		seen = i
	}
	wg.Wait()
}

func TestDiscard(t *testing.T) {
	const pages = 8
	tests := []struct {
		name   string
		gpa, n uint64
		gone   map[int]bool
	}{
		{"one page", PageSize, PageSize, map[int]bool{1: true}},
		{"nothing", PageSize, 0, nil},
		{"part of a page", PageSize, PageSize - 1, nil},
		{"inside a page", PageSize + 1, 10, nil},
		{"two halves", PageSize / 2, PageSize, nil},
		{"odd start", PageSize + 1, 2*PageSize - 1, map[int]bool{2: true}},
		{"odd end", PageSize, 2*PageSize - 1, map[int]bool{1: true}},
		{"odd both", PageSize - 1, 2*PageSize + 2, map[int]bool{1: true, 2: true}},
		{"all", 0, pages * PageSize, map[int]bool{0: true, 1: true, 2: true, 3: true, 4: true, 5: true, 6: true, 7: true}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := newMemory(t, pages*PageSize)
			full := bytes.Repeat([]byte{0xaa}, pages*PageSize)
			if err := errors.Join(m.Write(0, full), m.Discard(tt.gpa, tt.n)); err != nil {
				t.Fatal(err)
			}
			for i := range pages {
				got := make([]byte, PageSize)
				if err := m.Read(uint64(i)*PageSize, got); err != nil {
					t.Fatal(err)
				}
				want := full[:PageSize]
				if tt.gone[i] {
					want = make([]byte, PageSize)
				}
				if !bytes.Equal(got, want) {
					t.Errorf("page %d: gone %v", i, !tt.gone[i])
				}
			}
		})
	}
}

func tempFile(t testing.TB, content []byte) *os.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

func pattern(n int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i*7 + i>>8)
	}
	return p
}

func TestReadAndWriteFile(t *testing.T) {
	content := pattern(3 * PageSize)
	for name, ranges := range map[string][]Range{
		"none":    nil,
		"empty":   {{0, 0}},
		"one":     {{100, 5000}},
		"several": {{PageSize, 10}, {0, 0}, {0, 1}, {3 * PageSize, PageSize}, {20, 7}},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMemory(t, 4*PageSize)
			src := tempFile(t, content)
			var want int64
			for _, r := range ranges {
				want += int64(r.Len)
			}
			n, err := m.ReadFile(int(src.Fd()), 13, ranges)
			if err != nil || n != want {
				t.Fatalf("ReadFile: %d, %v", n, err)
			}
			dst := tempFile(t, nil)
			if n, err = m.WriteFile(int(dst.Fd()), 13, ranges); err != nil || n != want {
				t.Fatalf("WriteFile: %d, %v", n, err)
			}
			got, err := os.ReadFile(dst.Name())
			if err != nil {
				t.Fatal(err)
			}
			if want > 0 && !bytes.Equal(got[13:], content[13:13+want]) {
				t.Fatal("other bytes")
			}
		})
	}
}

// TestManyRanges passes more ranges than one call accepts.
func TestManyRanges(t *testing.T) {
	m := newMemory(t, 16*PageSize)
	const count = 2*maxIovecs + 5
	content := pattern(3 * count)
	var ranges []Range
	for i := range count {
		ranges = append(ranges, Range{GPA: uint64((count - i) * 8), Len: 3})
	}
	if n, err := m.ReadFile(int(tempFile(t, content).Fd()), 0, ranges); err != nil || n != 3*count {
		t.Fatalf("ReadFile: %d, %v", n, err)
	}
	for i, r := range ranges {
		got := make([]byte, 3)
		if err := m.Read(r.GPA, got); err != nil || !bytes.Equal(got, content[3*i:3*i+3]) {
			t.Fatalf("range %d: %x, %v", i, got, err)
		}
	}
}

func TestFileErrors(t *testing.T) {
	m := newMemory(t, 4*PageSize)
	f := tempFile(t, pattern(100))
	fd := int(f.Fd())
	// The file ends: fewer bytes, no error.
	if n, err := m.ReadFile(fd, 90, []Range{{0, 4}, {100, 50}, {200, 1}}); err != nil || n != 10 {
		t.Fatalf("short file: %d, %v", n, err)
	}
	if n, err := m.ReadFile(fd, 1000, []Range{{0, 4}}); err != nil || n != 0 {
		t.Fatalf("beyond the end: %d, %v", n, err)
	}
	// A range in the middle is outside of RAM: no byte is read.
	if n, err := m.ReadFile(fd, 0, []Range{{0, 4}, {1 << 30, 4}}); !errors.Is(err, ErrRange) || n != 0 {
		t.Fatalf("bad range: %d, %v", n, err)
	}
	got := make([]byte, 4)
	if err := m.Read(100, got); err != nil || !bytes.Equal(got, pattern(100)[94:98]) {
		t.Fatalf("%x, %v", got, err)
	}
	if _, err := m.WriteFile(fd, 0, []Range{{4*PageSize - 1, 2}}); !errors.Is(err, ErrRange) {
		t.Fatalf("bad range: %v", err)
	}
	if _, err := m.ReadFile(-1, 0, []Range{{0, 1}}); !errors.Is(err, unix.EBADF) {
		t.Fatalf("no file: %v", err)
	}
	if _, err := m.ReadFile(fd, -5, []Range{{0, 1}}); !errors.Is(err, unix.EINVAL) {
		t.Fatalf("negative offset: %v", err)
	}
}

// TestTransferGoesOn: transfers continue after short and interrupted calls.
func TestTransferGoesOn(t *testing.T) {
	m := newMemory(t, PageSize)
	calls := 0
	var got []byte
	if err := m.Write(0, []byte("abcdefgh")); err != nil {
		t.Fatal(err)
	}
	n, err := m.transfer([]Range{{0, 3}, {3, 0}, {3, 2}, {5, 3}}, m.slice, func(iov [][]byte, done int64) (int, error) {
		if calls++; calls%3 == 0 {
			return -1, unix.EINTR
		}
		if done != int64(len(got)) {
			t.Fatalf("done %d of %d", done, len(got))
		}
		p := bytes.Join(iov, nil)
		k := min(len(p), 1+calls%3)
		got = append(got, p[:k]...)
		return k, nil
	})
	if err != nil || n != 8 || string(got) != "abcdefgh" {
		t.Fatalf("%d, %v, %q", n, err, got)
	}
}

func TestCloseTwice(t *testing.T) {
	m, err := NewAnonymous(PageSize)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(m.Close(), m.Close()); err != nil {
		t.Fatal(err)
	}
	if m.Contains(0, 1) {
		t.Fatal("closed memory contains something")
	}
}

// FuzzRange compares every check with arithmetic that cannot overflow.
func FuzzRange(f *testing.F) {
	for _, r := range badRanges {
		f.Add(r.gpa, r.n)
	}
	f.Add(uint64(0), uint64(1))
	f.Add(uint64(GapEnd), uint64(4*PageSize))
	m, err := NewAnonymous(bigSize)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() {
		if err := m.Close(); err != nil {
			f.Error(err)
		}
	})
	f.Fuzz(func(t *testing.T, gpa, n uint64) {
		inside := func(start, end uint64) bool { return gpa >= start && gpa <= end && n <= end-gpa }
		want := inside(0, GapStart) || inside(GapEnd, GapEnd+4*PageSize)
		if got := m.Contains(gpa, n); got != want {
			t.Fatalf("Contains(%#x, %#x) = %v", gpa, n, got)
		}
		if n > 64 {
			return
		}
		p := make([]byte, n)
		for what, err := range map[string]error{
			"read": m.Read(gpa, p), "write": m.Write(gpa, p), "zero": m.Zero(gpa, n), "discard": m.Discard(gpa, n),
		} {
			if (err == nil) != want || err != nil && !errors.Is(err, ErrRange) {
				t.Fatalf("%s %#x+%#x: %v", what, gpa, n, err)
			}
		}
	})
}

func BenchmarkRead16(b *testing.B) {
	m := newMemory(b, bigSize)
	p := make([]byte, 16)
	for b.Loop() {
		if err := m.Read(GapEnd, p); err != nil {
			b.Fatal(err)
		}
	}
}
