package guestmem

import (
	"slices"

	"agentrun.dev/internal/storage/extent"
)

// mapping is a piece of RAM that one mmap call has made, or the rest of such a
// piece.
type mapping struct {
	extent.Run
	// source is 0 for anonymous memory. The kernel treats adjacent pieces of
	// the same source as one mapping.
	source int
}

// layout lists the mappings of all RAM, in order and without gaps. It matters
// because the kernel before Linux 6.5 protects only one mapping per call, and
// because the time to make a VM grows with the number of mappings.
type layout []mapping

// place records that s is now mapped from source.
func (l *layout) place(s extent.Run, source int) {
	old := *l
	var out layout
	if n := len(old); n > 0 && old[n-1].Start <= s.Start {
		// A new memory is mapped in ascending order: only the last piece has to
		// be split.
		last := [...]mapping{old[n-1]}
		out, old = old[:n-1], last[:]
	} else {
		out = make(layout, 0, len(old)+2)
	}
	placed := false
	for _, p := range old {
		if p.Start < s.Start {
			out = out.add(mapping{extent.Run{Start: p.Start, Length: min(p.End(), s.Start) - p.Start}, p.source})
		}
		if !placed && p.End() > s.Start {
			out = out.add(mapping{s, source})
			placed = true
		}
		if p.End() > s.End() {
			from := max(p.Start, s.End())
			out = out.add(mapping{extent.Run{Start: from, Length: p.End() - from}, p.source})
		}
	}
	*l = out
}

// add appends a piece.
func (l layout) add(p mapping) layout {
	if n := len(l); n > 0 && l[n-1].End() == p.Start && p.continues(l[n-1]) {
		l[n-1].Length += p.Length
		return l
	}
	return append(l, p)
}

// continues reports whether p and prev, which are adjacent, are one mapping.
// Adjacent pieces of anonymous memory may be several mappings, and RAM above
// the gap is elsewhere in the host.
func (p mapping) continues(prev mapping) bool {
	return p.source != 0 && p.source == prev.source && p.Start != GapStart
}

// within lists the parts of mappings in s.
func (l layout) within(s extent.Run) []mapping {
	i, _ := slices.BinarySearchFunc(l, s.Start, func(p mapping, at uint64) int {
		if p.End() <= at {
			return -1
		}
		return 1
	})
	var out []mapping
	for _, p := range l[i:] {
		from, to := max(s.Start, p.Start), min(s.End(), p.End())
		if from >= to {
			break
		}
		out = append(out, mapping{extent.Run{Start: from, Length: to - from}, p.source})
	}
	return out
}

// without lists the parts of sorted runs that have become anonymous memory.
func (l layout) without(runs []extent.Run) (out []extent.Run) {
	for _, s := range runs {
		for _, p := range l.within(s) {
			if p.source != 0 {
				continue
			}
			out = extent.Append(out, p.Start, p.End())
		}
	}
	return out
}
