package layer_test

import (
	"errors"
	"math"
	"strings"
	"testing"

	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/layer/layertest"
)

func TestDigest(t *testing.T) {
	var d layer.Digest
	for i := range d {
		d[i] = byte(i * 9)
	}
	got, err := layer.ParseDigest(d.String())
	if err != nil || got != d {
		t.Errorf("parse %s: %v, %v", d, got, err)
	}
	text, err := d.MarshalText()
	var back layer.Digest
	if err := errors.Join(err, back.UnmarshalText(text)); err != nil || back != d {
		t.Errorf("%s becomes %s: %v", d, back, err)
	}
	for _, bad := range []string{"", "00", strings.ToUpper(d.String()), d.String() + "00", strings.Repeat("g", 64), "../" + d.String()[3:], strings.Repeat("é", 32)} {
		if _, err := layer.ParseDigest(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

// ext makes an extent in pages of one of a stack's layers.
func ext(start, length uint64, of int, off uint64) layer.Extent {
	return layer.Extent{start * layer.PageSize, length * layer.PageSize, of, off * layer.PageSize}
}

func TestValidate(t *testing.T) {
	const p = layer.PageSize
	one := []layer.Ref{layertest.Ref(1, 4)}
	many := make([]layer.Ref, layer.MaxLayers+1)
	for i := range many {
		many[i] = layertest.Ref(byte(i), 1)
	}
	crowd := make([]layer.Extent, layer.MaxExtents+1)
	for i := range crowd {
		crowd[i] = ext(uint64(2*i), 1, 0, 0)
	}
	for _, c := range []struct {
		name  string
		stack layer.Stack
		say   string // empty: valid
	}{
		{"zeros", layer.Stack{Size: p}, ""},
		{"largest", layer.Stack{Size: layer.MaxSize}, ""},
		{"two extents of one layer, backwards", layer.Stack{8 * p, one, []layer.Extent{ext(0, 2, 0, 2), ext(2, 2, 0, 0)}}, ""},
		{"up to both ends", layer.Stack{8 * p, one, []layer.Extent{ext(4, 4, 0, 0)}}, ""},
		{"full", layer.Stack{1 << 30, many[:layer.MaxLayers], full()}, ""},

		{"empty", layer.Stack{}, "stack of 0 bytes"},
		{"odd size", layer.Stack{Size: p + 1}, "multiple of 4096"},
		{"huge", layer.Stack{Size: layer.MaxSize + p}, "at most"},
		{"overflowing size", layer.Stack{Size: math.MaxUint64 &^ (p - 1)}, "at most"},
		{"too many layers", layer.Stack{1 << 30, many, nil}, "9 layers"},
		{"too many extents", layer.Stack{1 << 30, one, crowd}, "257 extents"},
		{"empty layer", layer.Stack{8 * p, []layer.Ref{layertest.Ref(1, 0)}, []layer.Extent{ext(0, 1, 0, 0)}}, "of 0 bytes"},
		{"odd layer", layer.Stack{8 * p, []layer.Ref{{layer.Digest{1}, 100}}, []layer.Extent{ext(0, 1, 0, 0)}}, "of 100 bytes"},
		{"huge layer", layer.Stack{8 * p, []layer.Ref{{layer.Digest{1}, math.MaxUint64 &^ (p - 1)}}, []layer.Extent{ext(0, 1, 0, 0)}}, "at most"},
		{"layer twice", layer.Stack{8 * p, []layer.Ref{layertest.Ref(1, 4), layertest.Ref(1, 5)}, []layer.Extent{ext(0, 1, 0, 0), ext(1, 1, 1, 0)}}, "listed twice"},
		{"unused layer", layer.Stack{8 * p, []layer.Ref{layertest.Ref(1, 4), layertest.Ref(2, 4)}, []layer.Extent{ext(0, 1, 1, 0)}}, "used by no extent"},
		{"no such layer", layer.Stack{8 * p, one, []layer.Extent{ext(0, 1, 1, 0)}}, "layer 1 of 1"},
		{"negative layer", layer.Stack{8 * p, one, []layer.Extent{ext(0, 1, -1, 0)}}, "layer -1"},
		{"odd start", layer.Stack{8 * p, one, []layer.Extent{{1, p, 0, 0}}}, "whole pages"},
		{"odd length", layer.Stack{8 * p, one, []layer.Extent{{0, p + 1, 0, 0}}}, "whole pages"},
		{"odd offset", layer.Stack{8 * p, one, []layer.Extent{{0, p, 0, 8}}}, "whole pages"},
		{"empty extent", layer.Stack{8 * p, one, []layer.Extent{{0, 0, 0, 0}}}, "whole pages"},
		{"overlap", layer.Stack{8 * p, one, []layer.Extent{ext(0, 2, 0, 0), ext(1, 2, 0, 0)}}, "before the end"},
		{"order", layer.Stack{8 * p, one, []layer.Extent{ext(4, 1, 0, 0), ext(0, 1, 0, 0)}}, "before the end"},
		{"beyond the size", layer.Stack{8 * p, one, []layer.Extent{ext(7, 2, 0, 0)}}, "beyond the stack's size"},
		{"starts beyond the size", layer.Stack{8 * p, one, []layer.Extent{ext(9, 1, 0, 0)}}, "beyond the stack's size"},
		{"end overflows", layer.Stack{8 * p, one, []layer.Extent{{p, math.MaxUint64 &^ (p - 1), 0, 0}}}, "beyond the stack's size"},
		{"beyond the layer", layer.Stack{8 * p, one, []layer.Extent{ext(0, 2, 0, 3)}}, "beyond the size"},
		{"starts beyond the layer", layer.Stack{8 * p, one, []layer.Extent{ext(0, 1, 0, 5)}}, "beyond the size"},
		{"offset overflows", layer.Stack{8 * p, one, []layer.Extent{{0, 2 * p, 0, math.MaxUint64 &^ (p - 1)}}}, "beyond the size"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := c.stack.Validate()
			if c.say != "" {
				layertest.WantError(t, err, c.say)
			} else if err != nil {
				t.Error(err)
			}
		})
	}
}

// full makes as many extents as possible, of all layers.
func full() []layer.Extent {
	var list []layer.Extent
	for i := range uint64(layer.MaxExtents) {
		list = append(list, ext(2*i, 1, int(i%layer.MaxLayers), 0))
	}
	return list
}

func TestFind(t *testing.T) {
	stack := layer.Stack{10 * layer.PageSize, []layer.Ref{layertest.Ref(1, 8)}, []layer.Extent{ext(1, 2, 0, 0), ext(3, 1, 0, 4), ext(6, 2, 0, 5)}}
	if stack.Bytes() != 5*layer.PageSize {
		t.Errorf("%d bytes", stack.Bytes())
	}
	for off := range stack.Size + layer.PageSize {
		e, ok, next := stack.Find(off)
		we, wok, wnext := scan(stack, off)
		if e != we || ok != wok || next != wnext {
			t.Fatalf("at %#x: %v %v %#x, want %v %v %#x", off, e, ok, next, we, wok, wnext)
		}
	}
}

// scan is Find as a simple loop.
func scan(stack layer.Stack, off uint64) (layer.Extent, bool, uint64) {
	next := stack.Size
	for _, e := range stack.Extents {
		if off >= e.Start && off-e.Start < e.Length {
			return e, true, e.Start + e.Length
		}
		if e.Start > off {
			next = min(next, e.Start)
		}
	}
	return layer.Extent{}, false, next
}

// FuzzStack builds stacks from raw numbers. It walks through an accepted stack
// from end to end, and Find must agree with scan.
func FuzzStack(f *testing.F) {
	f.Add(uint64(8*layer.PageSize), []byte{4, 8}, []byte{0, 1, 0, 0, 2, 1, 1, 3})
	f.Add(uint64(layer.MaxSize), []byte{255}, []byte{0, 255, 0, 0})
	f.Add(uint64(0), []byte{}, []byte{})
	f.Add(uint64(1), []byte{0}, []byte{1, 1, 1, 1, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, size uint64, layers, extents []byte) {
		// A byte above 250 becomes a number that overflows in an addition.
		number := func(b byte) uint64 {
			if b > 250 {
				return (math.MaxUint64 - uint64(b-251)*layer.PageSize) &^ (layer.PageSize - 1)
			}
			return uint64(b) * layer.PageSize
		}
		stack := layer.Stack{Size: size}
		for i, b := range layers {
			stack.Layers = append(stack.Layers, layer.Ref{layer.Digest{byte(i % 250)}, number(b)})
		}
		for ; len(extents) >= 4; extents = extents[4:] {
			stack.Extents = append(stack.Extents, layer.Extent{number(extents[0]), number(extents[1]), int(int8(extents[2])), number(extents[3])})
		}
		if stack.Validate() != nil {
			return
		}
		var covered uint64
		for off := uint64(0); off < stack.Size; {
			e, ok, next := stack.Find(off)
			we, wok, wnext := scan(stack, off)
			if e != we || ok != wok || next != wnext {
				t.Fatalf("at %#x: %v %v %#x, want %v %v %#x", off, e, ok, next, we, wok, wnext)
			}
			if next <= off || next > stack.Size {
				t.Fatalf("after %#x comes %#x, the size is %#x", off, next, stack.Size)
			}
			if ok {
				covered += next - off
			}
			off = next
		}
		if covered != stack.Bytes() {
			t.Fatalf("%d bytes found, Bytes says %d", covered, stack.Bytes())
		}
	})
}
