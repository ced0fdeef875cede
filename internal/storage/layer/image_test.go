package layer

import (
	"errors"
	"math"
	"strings"
	"testing"
)

func TestDigest(t *testing.T) {
	var d Digest
	for i := range d {
		d[i] = byte(i * 9)
	}
	got, err := ParseDigest(d.String())
	if err != nil || got != d {
		t.Errorf("parse %s: %v, %v", d, got, err)
	}
	text, err := d.MarshalText()
	var back Digest
	if err := errors.Join(err, back.UnmarshalText(text)); err != nil || back != d {
		t.Errorf("%s becomes %s: %v", d, back, err)
	}
	for _, bad := range []string{"", "00", strings.ToUpper(d.String()), d.String() + "00", strings.Repeat("g", 64), "../" + d.String()[3:], strings.Repeat("é", 32)} {
		if _, err := ParseDigest(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

func ref(n byte, pages uint64) Ref { return Ref{Digest{n}, pages * PageSize} }

// ext is an extent in pages.
func ext(start, length uint64, layer int, off uint64) Extent {
	return Extent{start * PageSize, length * PageSize, layer, off * PageSize}
}

func TestValidate(t *testing.T) {
	const p = PageSize
	one := []Ref{ref(1, 4)}
	many := make([]Ref, MaxLayers+1)
	for i := range many {
		many[i] = ref(byte(i), 1)
	}
	crowd := make([]Extent, MaxExtents+1)
	for i := range crowd {
		crowd[i] = ext(uint64(2*i), 1, 0, 0)
	}
	for _, c := range []struct {
		name string
		im   Image
		say  string // empty: valid
	}{
		{"zeros", Image{Size: p}, ""},
		{"largest", Image{Size: MaxSize}, ""},
		{"two extents of one layer, backwards", Image{8 * p, one, []Extent{ext(0, 2, 0, 2), ext(2, 2, 0, 0)}}, ""},
		{"up to both ends", Image{8 * p, one, []Extent{ext(4, 4, 0, 0)}}, ""},
		{"full", Image{1 << 30, many[:MaxLayers], full()}, ""},

		{"empty", Image{}, "image of 0 bytes"},
		{"odd size", Image{Size: p + 1}, "multiple of 4096"},
		{"huge", Image{Size: MaxSize + p}, "at most"},
		{"overflowing size", Image{Size: math.MaxUint64 &^ (p - 1)}, "at most"},
		{"too many layers", Image{1 << 30, many, nil}, "9 layers"},
		{"too many extents", Image{1 << 30, one, crowd}, "257 extents"},
		{"empty layer", Image{8 * p, []Ref{ref(1, 0)}, []Extent{ext(0, 1, 0, 0)}}, "of 0 bytes"},
		{"odd layer", Image{8 * p, []Ref{{Digest{1}, 100}}, []Extent{ext(0, 1, 0, 0)}}, "of 100 bytes"},
		{"huge layer", Image{8 * p, []Ref{{Digest{1}, math.MaxUint64 &^ (p - 1)}}, []Extent{ext(0, 1, 0, 0)}}, "at most"},
		{"layer twice", Image{8 * p, []Ref{ref(1, 4), ref(1, 5)}, []Extent{ext(0, 1, 0, 0), ext(1, 1, 1, 0)}}, "listed twice"},
		{"unused layer", Image{8 * p, []Ref{ref(1, 4), ref(2, 4)}, []Extent{ext(0, 1, 1, 0)}}, "used by no extent"},
		{"no such layer", Image{8 * p, one, []Extent{ext(0, 1, 1, 0)}}, "layer 1 of 1"},
		{"negative layer", Image{8 * p, one, []Extent{ext(0, 1, -1, 0)}}, "layer -1"},
		{"odd start", Image{8 * p, one, []Extent{{1, p, 0, 0}}}, "whole pages"},
		{"odd length", Image{8 * p, one, []Extent{{0, p + 1, 0, 0}}}, "whole pages"},
		{"odd offset", Image{8 * p, one, []Extent{{0, p, 0, 8}}}, "whole pages"},
		{"empty extent", Image{8 * p, one, []Extent{{0, 0, 0, 0}}}, "whole pages"},
		{"overlap", Image{8 * p, one, []Extent{ext(0, 2, 0, 0), ext(1, 2, 0, 0)}}, "before the end"},
		{"order", Image{8 * p, one, []Extent{ext(4, 1, 0, 0), ext(0, 1, 0, 0)}}, "before the end"},
		{"beyond the size", Image{8 * p, one, []Extent{ext(7, 2, 0, 0)}}, "beyond the image's size"},
		{"starts beyond the size", Image{8 * p, one, []Extent{ext(9, 1, 0, 0)}}, "beyond the image's size"},
		{"end overflows", Image{8 * p, one, []Extent{{p, math.MaxUint64 &^ (p - 1), 0, 0}}}, "beyond the image's size"},
		{"beyond the layer", Image{8 * p, one, []Extent{ext(0, 2, 0, 3)}}, "beyond the size"},
		{"starts beyond the layer", Image{8 * p, one, []Extent{ext(0, 1, 0, 5)}}, "beyond the size"},
		{"offset overflows", Image{8 * p, one, []Extent{{0, 2 * p, 0, math.MaxUint64 &^ (p - 1)}}}, "beyond the size"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := c.im.Validate()
			if c.say != "" {
				wantError(t, err, c.say)
			} else if err != nil {
				t.Error(err)
			}
		})
	}
}

// full are as many extents as possible, of all layers.
func full() []Extent {
	var list []Extent
	for i := range uint64(MaxExtents) {
		list = append(list, ext(2*i, 1, int(i%MaxLayers), 0))
	}
	return list
}

func TestFind(t *testing.T) {
	im := Image{10 * PageSize, []Ref{ref(1, 8)}, []Extent{ext(1, 2, 0, 0), ext(3, 1, 0, 4), ext(6, 2, 0, 5)}}
	if im.Bytes() != 5*PageSize {
		t.Errorf("%d bytes", im.Bytes())
	}
	for off := range im.Size + PageSize {
		e, ok, next := im.Find(off)
		we, wok, wnext := scan(im, off)
		if e != we || ok != wok || next != wnext {
			t.Fatalf("at %#x: %v %v %#x, want %v %v %#x", off, e, ok, next, we, wok, wnext)
		}
	}
}

// scan is Find without cleverness.
func scan(im Image, off uint64) (Extent, bool, uint64) {
	next := im.Size
	for _, e := range im.Extents {
		if off >= e.Start && off-e.Start < e.Length {
			return e, true, e.Start + e.Length
		}
		if e.Start > off {
			next = min(next, e.Start)
		}
	}
	return Extent{}, false, next
}

// FuzzImage builds images from raw numbers. An accepted one is walked from end
// to end, and Find must agree with scan.
func FuzzImage(f *testing.F) {
	f.Add(uint64(8*PageSize), []byte{4, 8}, []byte{0, 1, 0, 0, 2, 1, 1, 3})
	f.Add(uint64(MaxSize), []byte{255}, []byte{0, 255, 0, 0})
	f.Add(uint64(0), []byte{}, []byte{})
	f.Add(uint64(1), []byte{0}, []byte{1, 1, 1, 1, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, size uint64, layers, extents []byte) {
		// A byte above 250 is a number that overflows when it is added to.
		number := func(b byte) uint64 {
			if b > 250 {
				return (math.MaxUint64 - uint64(b-251)*PageSize) &^ (PageSize - 1)
			}
			return uint64(b) * PageSize
		}
		im := Image{Size: size}
		for i, b := range layers {
			im.Layers = append(im.Layers, Ref{Digest{byte(i % 250)}, number(b)})
		}
		for ; len(extents) >= 4; extents = extents[4:] {
			im.Extents = append(im.Extents, Extent{number(extents[0]), number(extents[1]), int(int8(extents[2])), number(extents[3])})
		}
		if im.Validate() != nil {
			return
		}
		var covered uint64
		for off := uint64(0); off < im.Size; {
			e, ok, next := im.Find(off)
			we, wok, wnext := scan(im, off)
			if e != we || ok != wok || next != wnext {
				t.Fatalf("at %#x: %v %v %#x, want %v %v %#x", off, e, ok, next, we, wok, wnext)
			}
			if next <= off || next > im.Size {
				t.Fatalf("after %#x comes %#x, the size is %#x", off, next, im.Size)
			}
			if ok {
				covered += next - off
			}
			off = next
		}
		if covered != im.Bytes() {
			t.Fatalf("%d bytes found, Bytes says %d", covered, im.Bytes())
		}
	})
}
