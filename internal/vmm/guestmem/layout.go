package guestmem

import "slices"

// mapping is a piece of RAM that one call of mmap has made, or what is left of
// it.
type mapping struct {
	Span
	// source is 0 for anonymous memory. Pieces of the same source that touch
	// are one mapping for the kernel.
	source int
}

// layout is the mappings of all RAM, in order and without gaps between them.
// The kernel protects one mapping at a time (before Linux 6.5), and the time
// to make a VM grows with their number.
type layout []mapping

// place notes that s is mapped from source now.
func (l *layout) place(s Span, source int) {
	old := *l
	var out layout
	if n := len(old); n > 0 && old[n-1].Start <= s.Start {
		// A memory is mapped in order: only its last piece is split.
		last := [...]mapping{old[n-1]}
		out, old = old[:n-1], last[:]
	} else {
		out = make(layout, 0, len(old)+2)
	}
	placed := false
	for _, p := range old {
		if p.Start < s.Start {
			out = out.add(mapping{Span{p.Start, min(p.end(), s.Start) - p.Start}, p.source})
		}
		if !placed && p.end() > s.Start {
			out = out.add(mapping{s, source})
			placed = true
		}
		if p.end() > s.end() {
			from := max(p.Start, s.end())
			out = out.add(mapping{Span{from, p.end() - from}, p.source})
		}
	}
	*l = out
}

// add puts a piece at the end.
func (l layout) add(p mapping) layout {
	if n := len(l); n > 0 && l[n-1].end() == p.Start && p.continues(l[n-1]) {
		l[n-1].Length += p.Length
		return l
	}
	return append(l, p)
}

// continues reports whether p and prev, which touch, are one mapping. Those of
// anonymous memory need not be, and behind the gap RAM goes on elsewhere.
func (p mapping) continues(prev mapping) bool {
	return p.source != 0 && p.source == prev.source && p.Start != GapStart
}

// within lists the parts of mappings in s.
func (l layout) within(s Span) []mapping {
	i, _ := slices.BinarySearchFunc(l, s.Start, func(p mapping, at uint64) int {
		if p.end() <= at {
			return -1
		}
		return 1
	})
	var out []mapping
	for _, p := range l[i:] {
		from, to := max(s.Start, p.Start), min(s.end(), p.end())
		if from >= to {
			break
		}
		out = append(out, mapping{Span{from, to - from}, p.source})
	}
	return out
}

// without lists where, in sorted spans, nothing but anonymous memory is.
func (l layout) without(spans []Span) (out []Span) {
	for _, s := range spans {
		for _, p := range l.within(s) {
			if p.source != 0 {
				continue
			}
			if n := len(out); n > 0 && out[n-1].end() == p.Start {
				out[n-1].Length += p.Length
			} else {
				out = append(out, p.Span)
			}
		}
	}
	return out
}

// unite merges two sorted lists of spans; spans that touch become one.
func unite(a, b []Span) []Span {
	all := slices.Concat(a, b)
	slices.SortFunc(all, func(x, y Span) int {
		if x.Start < y.Start {
			return -1
		}
		return 1
	})
	var out []Span
	for _, s := range all {
		if n := len(out); n > 0 && s.Start <= out[n-1].end() {
			out[n-1].Length = max(out[n-1].end(), s.end()) - out[n-1].Start
			continue
		}
		out = append(out, s)
	}
	return out
}
