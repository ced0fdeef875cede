package disk

import (
	"cmp"
	"io"
	"slices"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
)

// Changed lists what differs from the stack below: runs to be stored, and
// ranges that are zeros now and need no place in a layer. Both are sorted,
// have at most MaxRuns entries and do not overlap; runs are joined over small
// gaps, whose content is to be stored with them.
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

// changed is Changed for a set of blocks that are in stages. What include has of
// the disk is listed in any case, but for what nobody has ever written: that is
// zeros whatever the stack is.
func (v *view) changed(set *bitmap, include []extent.Run) (runs, zeros []extent.Run) {
	runs, zeros = v.content(set)
	more, erased := v.within(include)
	runs = extent.Unite(runs, more)
	zeros = extent.Subtract(extent.Unite(v.hiding(zeros), erased), runs)
	if len(zeros) > layer.MaxRuns {
		// The small ones are cheaper stored than listed.
		bySize := slices.Clone(zeros)
		slices.SortStableFunc(bySize, func(a, b extent.Run) int { return cmp.Compare(b.Length, a.Length) })
		zeros = extent.Sort(bySize[:layer.MaxRuns])
		runs = extent.Sort(append(runs, bySize[layer.MaxRuns:]...))
	}
	runs = extent.Coalesce(runs, layer.MaxRuns)
	// Zeros lie wholly inside a joined gap or wholly outside.
	zeros = slices.DeleteFunc(zeros, func(z extent.Run) bool {
		i, exact := slices.BinarySearchFunc(runs, z.Start, func(r extent.Run, at uint64) int { return cmp.Compare(r.Start, at) })
		return exact || i > 0 && runs[i-1].End() > z.Start
	})
	return runs, zeros
}

// within divides what is in some runs into data, of a stage or of the stack, and
// what was erased.
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

// hiding keeps those parts of zeros that hide something, in the stack or in an
// older stage: elsewhere there are zeros already.
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

// WriteChanged writes the present content of runs, one after the other.
func (d *Disk) WriteChanged(w io.Writer, runs []extent.Run) error {
	return d.writeRuns(w, runs)
}

func (v *view) writeRuns(w io.Writer, runs []extent.Run) error {
	if err := extent.Check(runs, v.below.Stack.Size, len(runs)); err != nil {
		return err
	}
	return layer.CopyRuns(w, runs, v.read)
}
