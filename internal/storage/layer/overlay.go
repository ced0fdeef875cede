package layer

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"agentrun.dev/internal/storage/extent"
)

// ErrNeedsCompaction means that the stack has too many layers or extents to
// take another layer. Compact makes room.
var ErrNeedsCompaction = errors.New("stack needs compaction")

const (
	// gatheredGap is the largest gap that is worth storing to save an extent.
	// An extent costs each fork two mappings, and at its boundaries a fault
	// maps fewer of the neighbouring pages.
	gatheredGap = 64 << 10
	// Gathering may add gatheredBytes to a layer, and this fraction of its
	// size.
	gatheredBytes = 1 << 20
	gatheredPart  = 16
)

// Gather is extent.Coalesce for a layer of memory, which has at most MaxRuns runs.
// It also closes small gaps when that is not necessary, as long as the layer grows
// only a little.
func Gather(runs []extent.Run) []extent.Run {
	runs, gaps := extent.Gaps(runs)
	budget := uint64(gatheredBytes)
	for _, r := range runs {
		budget += r.Length / gatheredPart
	}
	n := 0
	for n < len(gaps) && (len(runs)-n > MaxRuns || gaps[n] <= min(gatheredGap, budget)) {
		budget -= min(gaps[n], budget)
		n++
	}
	return extent.CloseSmallest(runs, gaps, n)
}

// Overlay puts a packed layer over base: the layer stores the runs one after
// the other from offset 0 on. zeros are ranges that now read as zeros; where a
// run and zeros overlap, the run wins. If runs is empty, top is ignored. Layers
// that are no longer used are dropped.
func Overlay(base Stack, top Ref, runs, zeros []extent.Run) (Stack, error) {
	var offset uint64
	extents := make([]Extent, len(runs))
	for i, r := range runs {
		extents[i] = Extent{Start: r.Start, Length: r.Length, Offset: offset}
		offset += r.Length
	}
	stack, err := overlay(base, top, extents, runs, zeros)
	if err == nil && len(runs) > 0 && offset != top.Size {
		return Stack{}, fmt.Errorf("overlay layer %s: it has %d bytes, its runs have %d", top.Digest, top.Size, offset)
	}
	return stack, err
}

// OverlayInPlace is Overlay for a layer that is as large as the stack and has
// each run at its own offset, and holes elsewhere.
func OverlayInPlace(base Stack, top Ref, runs, zeros []extent.Run) (Stack, error) {
	extents := make([]Extent, len(runs))
	for i, r := range runs {
		extents[i] = Extent{Start: r.Start, Length: r.Length, Offset: r.Start}
	}
	stack, err := overlay(base, top, extents, runs, zeros)
	if err == nil && len(runs) > 0 && top.Size != base.Size {
		return Stack{}, fmt.Errorf("overlay layer %s: it has %d bytes, the stack %d", top.Digest, top.Size, base.Size)
	}
	return stack, err
}

// overlay puts extents over base. They are those of runs, in the layer top.
func overlay(base Stack, top Ref, extents []Extent, runs, zeros []extent.Run) (Stack, error) {
	if err := base.Validate(); err != nil {
		return Stack{}, fmt.Errorf("overlay: %w", err)
	}
	if len(runs) > MaxRuns {
		return Stack{}, fmt.Errorf("overlay %d runs: at most %d are possible, coalesce them first", len(runs), MaxRuns)
	}
	if err := extent.Check(runs, base.Size, MaxRuns); err != nil {
		return Stack{}, fmt.Errorf("overlay runs: %w", err)
	}
	if err := extent.Check(zeros, base.Size, len(zeros)); err != nil {
		return Stack{}, fmt.Errorf("overlay zeros: %w", err)
	}
	out := Stack{
		Size:    base.Size,
		Layers:  slices.Clone(base.Layers),
		Extents: subtract(subtract(base.Extents, zeros), runs),
	}
	if len(runs) > 0 {
		if err := out.add(top, extents); err != nil {
			return Stack{}, err
		}
	}
	out.tidy()
	if len(out.Layers) > MaxLayers || len(out.Extents) > MaxExtents {
		return Stack{}, fmt.Errorf("%d layers (limit %d), %d extents (limit %d): %w",
			len(out.Layers), MaxLayers, len(out.Extents), MaxExtents, ErrNeedsCompaction)
	}
	return out, nil
}

// subtract removes sorted cuts from sorted extents.
func subtract(extents []Extent, cuts []extent.Run) []Extent {
	var out []Extent
	for _, e := range extents {
		for len(cuts) > 0 && cuts[0].End() <= e.Start {
			cuts = cuts[1:]
		}
		// The last cut of this extent may reach into the next one.
		for _, c := range cuts {
			if c.Start >= e.End() {
				break
			}
			if c.Start > e.Start {
				out = append(out, e.head(c.Start-e.Start))
			}
			e = e.tail(min(c.End(), e.End()) - e.Start)
		}
		if e.Length > 0 {
			out = append(out, e)
		}
	}
	return out
}

// head is the first n bytes of an extent, tail the rest.
func (e Extent) head(n uint64) Extent { return Extent{e.Start, n, e.Layer, e.Offset} }
func (e Extent) tail(n uint64) Extent {
	return Extent{e.Start + n, e.Length - n, e.Layer, e.Offset + n}
}

// add appends the extents of one layer; tidy sorts them.
func (s *Stack) add(top Ref, extents []Extent) error {
	if err := top.validate(); err != nil {
		return fmt.Errorf("overlay: %w", err)
	}
	// The same bytes may have been stored before: one file is one layer.
	i := slices.IndexFunc(s.Layers, func(r Ref) bool { return r.Digest == top.Digest })
	if i < 0 {
		i = len(s.Layers)
		s.Layers = append(s.Layers, top)
	}
	if have := s.Layers[i].Size; have != top.Size {
		return fmt.Errorf("overlay layer %s: it has %d bytes, and %d in the stack below", top.Digest, top.Size, have)
	}
	for _, e := range extents {
		e.Layer = i
		s.Extents = append(s.Extents, e)
	}
	return nil
}

// tidy sorts the extents, merges those that continue each other and drops
// unused layers.
func (s *Stack) tidy() {
	slices.SortFunc(s.Extents, func(a, b Extent) int { return cmp.Compare(a.Start, b.Start) })
	var merged []Extent
	number := make([]int, len(s.Layers))
	for _, e := range s.Extents {
		number[e.Layer] = 1
		if n := len(merged); n > 0 && e.continues(merged[n-1]) {
			merged[n-1].Length += e.Length
			continue
		}
		merged = append(merged, e)
	}
	var layers []Ref
	for i, l := range s.Layers {
		if number[i] == 0 {
			continue
		}
		number[i] = len(layers)
		layers = append(layers, l)
	}
	for i := range merged {
		merged[i].Layer = number[merged[i].Layer]
	}
	s.Layers, s.Extents = layers, merged
}
