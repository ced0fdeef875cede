package disk

import (
	"cmp"
	"io"
	"slices"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
)

// Changed lists the differences from the stack below: runs to be stored, and
// ranges that are now zeros and take no room in a layer. Both lists are sorted,
// have at most MaxRuns entries and do not overlap. Runs are joined over small
// gaps; the content of the gaps is stored with them.
func (d *Disk) Changed() (runs, zeros []extent.Run) {
	if d.ReadOnly() {
		return nil, nil
	}
	all := newBitmap(d.below.Stack.Size / blockSize)
	for _, s := range d.stages {
		all.add(&s.present)
	}
	return d.changed(&all, nil)
}

// changed is Changed for a set of blocks that are in stages. It also lists the
// blocks of include, whether they changed or not, except those that no stage and
// no layer contains: they are zeros above any stack.
func (v *view) changed(set *bitmap, include []extent.Run) (runs, zeros []extent.Run) {
	runs, zeros = v.content(set)
	more, erased := v.within(include)
	runs = extent.Unite(runs, more)
	zeros = extent.Subtract(extent.Unite(v.hiding(zeros), erased), runs)
	if len(zeros) > layer.MaxRuns {
		// Small zero ranges are cheaper to store than to list.
		bySize := slices.Clone(zeros)
		slices.SortStableFunc(bySize, func(a, b extent.Run) int { return cmp.Compare(b.Length, a.Length) })
		zeros = extent.Sort(bySize[:layer.MaxRuns])
		runs = extent.Sort(append(runs, bySize[layer.MaxRuns:]...))
	}
	runs = extent.Coalesce(runs, layer.MaxRuns)
	// Each zero range lies completely inside a joined gap or completely
	// outside.
	zeros = slices.DeleteFunc(zeros, func(z extent.Run) bool {
		i, exact := slices.BinarySearchFunc(runs, z.Start, func(r extent.Run, at uint64) int { return cmp.Compare(r.Start, at) })
		return exact || i > 0 && runs[i-1].End() > z.Start
	})
	return runs, zeros
}

// within divides the content of some runs into data, from a stage or from the
// stack, and erased ranges.
func (v *view) within(include []extent.Run) (data, erased []extent.Run) {
	written := newBitmap(v.below.Stack.Size / blockSize)
	for _, r := range include {
		for off := r.Start; off < r.End(); {
			s, _, in, next := v.segment(off, r.End())
			switch {
			case s != nil:
				written.set(off/blockSize, next/blockSize)
			case in:
				data = extent.Append(data, off, next)
			}
			off = next
		}
	}
	more, erased := v.content(&written)
	return append(data, more...), erased
}

// hiding keeps those parts of zeros that hide data in the stack or in an older
// stage. The other parts would read as zeros anyway.
func (v *view) hiding(zeros []extent.Run) []extent.Run {
	older := view{v.below, v.stages[1:]}
	var out []extent.Run
	for _, z := range zeros {
		for off := z.Start; off < z.End(); {
			s, _, in, next := older.segment(off, z.End())
			if s != nil || in {
				out = extent.Append(out, off, next)
			}
			off = next
		}
	}
	return out
}

// WriteChanged writes the current content of runs, one after the other.
func (d *Disk) WriteChanged(w io.Writer, runs []extent.Run) error {
	return d.writeRuns(w, runs)
}

func (v *view) writeRuns(w io.Writer, runs []extent.Run) error {
	if err := extent.Check(runs, v.below.Stack.Size, len(runs)); err != nil {
		return err
	}
	return layer.CopyRuns(w, runs, v.read)
}
