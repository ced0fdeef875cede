package layer

import (
	"cmp"
	"io"
	"slices"
)

// Changed lists what differs from the image below: runs to be stored, and
// ranges that are zeros now and need no place in a layer. Both are sorted,
// have at most MaxRuns entries and do not overlap; runs are joined over small
// gaps, whose content is to be stored with them.
func (d *Disk) Changed() (runs, zeros []Run) {
	if d.ReadOnly() {
		return nil, nil
	}
	all := newBitmap(d.below.image.Size / PageSize)
	for _, s := range d.stages {
		all.add(&s.present)
	}
	return d.changed(&all, nil)
}

// changed is Changed for a set of blocks that are in stages. What include has of
// the disk is listed in any case, but for what nobody has ever written: that is
// zeros whatever the image is.
func (v *view) changed(set *bitmap, include []Run) (runs, zeros []Run) {
	runs, zeros = v.content(set)
	more, erased := v.within(include)
	runs = joinOverlaps(sortRuns(append(runs, more...)))
	zeros = joinOverlaps(sortRuns(append(v.hiding(zeros), erased...)))
	zeros = cut(zeros, runs)
	if len(zeros) > MaxRuns {
		// The small ones are cheaper stored than listed.
		bySize := slices.Clone(zeros)
		slices.SortStableFunc(bySize, func(a, b Run) int { return cmp.Compare(b.Length, a.Length) })
		zeros = sortRuns(bySize[:MaxRuns])
		runs = sortRuns(append(runs, bySize[MaxRuns:]...))
	}
	runs = Coalesce(runs, MaxRuns)
	// Zeros lie wholly inside a joined gap or wholly outside.
	zeros = slices.DeleteFunc(zeros, func(z Run) bool {
		i, exact := slices.BinarySearchFunc(runs, z.Start, func(r Run, at uint64) int { return cmp.Compare(r.Start, at) })
		return exact || i > 0 && runs[i-1].end() > z.Start
	})
	return runs, zeros
}

// within divides what is in some runs into data, of a stage or of the image, and
// what was erased.
func (v *view) within(include []Run) (data, erased []Run) {
	written := newBitmap(v.below.image.Size / PageSize)
	for _, r := range include {
		for off := r.Start; off < r.end(); {
			s, _, in, next := v.segment(off, r.end())
			switch {
			case s != nil:
				written.set(off/PageSize, next/PageSize)
			case in:
				data = appendRun(data, off, next)
			}
			off = next
		}
	}
	more, erased := v.content(&written)
	return append(data, more...), erased
}

// joinOverlaps makes sorted runs disjoint.
func joinOverlaps(runs []Run) []Run {
	var out []Run
	for _, r := range runs {
		if n := len(out); n > 0 && r.Start < out[n-1].end() {
			out[n-1].Length = max(out[n-1].end(), r.end()) - out[n-1].Start
			continue
		}
		out = append(out, r)
	}
	return out
}

// cut removes sorted cuts from sorted runs.
func cut(runs, cuts []Run) []Run {
	extents := make([]Extent, len(runs))
	for i, r := range runs {
		extents[i] = Extent{Start: r.Start, Length: r.Length}
	}
	var out []Run
	for _, e := range subtract(extents, cuts) {
		out = append(out, Run{e.Start, e.Length})
	}
	return out
}

func sortRuns(runs []Run) []Run {
	slices.SortFunc(runs, func(a, b Run) int { return cmp.Compare(a.Start, b.Start) })
	return runs
}

// appendRun adds [off, end), to the last run if it ends there.
func appendRun(runs []Run, off, end uint64) []Run {
	if n := len(runs); n > 0 && runs[n-1].end() == off {
		runs[n-1].Length += end - off
		return runs
	}
	return append(runs, Run{off, end - off})
}

// hiding keeps those parts of zeros that hide something, in the image or in an
// older stage: elsewhere there are zeros already.
func (v *view) hiding(zeros []Run) []Run {
	older := view{v.below, v.stages[1:]}
	var out []Run
	for _, z := range zeros {
		for off := z.Start; off < z.end(); {
			s, _, in, next := older.segment(off, z.end())
			if s != nil || in {
				out = appendRun(out, off, next)
			}
			off = next
		}
	}
	return out
}

// WriteChanged writes the present content of runs, one after the other.
func (d *Disk) WriteChanged(w io.Writer, runs []Run) error {
	return d.writeRuns(w, runs)
}

func (v *view) writeRuns(w io.Writer, runs []Run) error {
	if err := validateRuns(runs, v.below.image.Size); err != nil {
		return err
	}
	return copyRuns(w, runs, v.read)
}
