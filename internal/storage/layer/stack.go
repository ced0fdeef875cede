package layer

import (
	"fmt"
	"slices"
	"sort"

	"agentrun.dev/internal/storage/extent"
)

const (
	// PageSize is the granule of stacks and layers.
	PageSize = extent.PageSize
	// MaxLayers is how many files a stack may consist of.
	MaxLayers = 8
	// MaxExtents bounds a stack: each extent of a memory is a mapping, and the
	// time of a fork grows with the number of mappings.
	MaxExtents = 256
	// MaxRuns is how many extents one new layer may add. A compacted stack
	// always has room for so many runs and zeros.
	MaxRuns = 64
	// MaxSize bounds stacks and layers: the largest file that ext4 can hold.
	// Offsets below it add up without overflow.
	MaxSize = 16 << 40
)

// Extent says that the bytes from Start on are the bytes of a layer from Offset
// on.
type Extent struct {
	Start, Length uint64
	// Layer is an index into Stack.Layers.
	Layer  int
	Offset uint64
}

// End is the first byte after the extent.
func (e Extent) End() uint64 { return e.Start + e.Length }

// continues reports whether e starts where prev ends, in the stack and in the
// layer.
func (e Extent) continues(prev Extent) bool {
	return e.Layer == prev.Layer && e.Start == prev.End() && e.Offset == prev.Offset+prev.Length
}

// Stack is the content of a memory or a disk. The extents are sorted and
// disjoint; the ranges between them read as zeros.
type Stack struct {
	Size    uint64
	Layers  []Ref
	Extents []Extent
}

// Validate checks a stack that came from a file or another process. The other
// functions rely on its checks.
func (s Stack) Validate() error {
	if s.Size == 0 || s.Size%PageSize != 0 || s.Size > MaxSize {
		return fmt.Errorf("stack of %d bytes: must be a multiple of %d, above zero and at most %d", s.Size, PageSize, uint64(MaxSize))
	}
	if len(s.Layers) > MaxLayers {
		return fmt.Errorf("stack of %d layers: at most %d are possible", len(s.Layers), MaxLayers)
	}
	if len(s.Extents) > MaxExtents {
		return fmt.Errorf("stack of %d extents: at most %d are possible", len(s.Extents), MaxExtents)
	}
	for i, l := range s.Layers {
		if err := l.validate(); err != nil {
			return err
		}
		for _, other := range s.Layers[:i] {
			if other.Digest == l.Digest {
				return fmt.Errorf("layer %s is listed twice", l.Digest)
			}
		}
	}
	return s.validateExtents()
}

func (s Stack) validateExtents() error {
	var end uint64
	var used [MaxLayers]bool
	for i, e := range s.Extents {
		if e.Layer < 0 || e.Layer >= len(s.Layers) {
			return fmt.Errorf("extent %d is in layer %d of %d", i, e.Layer, len(s.Layers))
		}
		used[e.Layer] = true
		l := s.Layers[e.Layer]
		switch {
		case e.Start%PageSize != 0 || e.Length%PageSize != 0 || e.Offset%PageSize != 0 || e.Length == 0:
			return fmt.Errorf("extent %d (%#x+%#x at %#x): not in whole pages", i, e.Start, e.Length, e.Offset)
		case e.Start < end:
			return fmt.Errorf("extent %d starts at %#x, before the end %#x of the one before", i, e.Start, end)
		case e.Start > s.Size || e.Length > s.Size-e.Start:
			return fmt.Errorf("extent %d (%#x+%#x): beyond the stack's size %#x", i, e.Start, e.Length, s.Size)
		case e.Offset > l.Size || e.Length > l.Size-e.Offset:
			return fmt.Errorf("extent %d (%#x bytes at %#x): beyond the size %#x of layer %s", i, e.Length, e.Offset, l.Size, l.Digest)
		}
		end = e.End()
	}
	for i, l := range s.Layers {
		if !used[i] {
			return fmt.Errorf("layer %s is used by no extent", l.Digest)
		}
	}
	return nil
}

// Find returns the extent that covers off. If no extent does, next is the end
// of the zeros: the start of the next extent, or the stack's size.
func (s Stack) Find(off uint64) (e Extent, ok bool, next uint64) {
	i := sort.Search(len(s.Extents), func(i int) bool { return s.Extents[i].End() > off })
	switch {
	case i == len(s.Extents):
		return Extent{}, false, s.Size
	case s.Extents[i].Start > off:
		return Extent{}, false, s.Extents[i].Start
	}
	return s.Extents[i], true, s.Extents[i].End()
}

// Bytes is how much of the stack the extents cover.
func (s Stack) Bytes() uint64 {
	var n uint64
	for _, e := range s.Extents {
		n += e.Length
	}
	return n
}

// Without returns the stack without some layers, and the runs that were in
// them.
func (s Stack) Without(drop func(Ref) bool) (rest Stack, runs []extent.Run) {
	rest = Stack{Size: s.Size, Layers: slices.Clone(s.Layers)}
	for _, e := range s.Extents {
		if drop(s.Layers[e.Layer]) {
			runs = extent.Append(runs, e.Start, e.End())
			continue
		}
		rest.Extents = append(rest.Extents, e)
	}
	rest.tidy()
	return rest, runs
}
