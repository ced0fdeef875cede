// Package extent defines runs of bytes in a memory or on a disk, and operations on
// lists of them. A list is sorted and its runs are disjoint, unless a function says
// otherwise.
package extent

import (
	"cmp"
	"fmt"
	"slices"
)

// PageSize is the granule of runs.
const PageSize = 4096

// Run is a range of bytes. In a memory, Start is an offset in RAM, which leaves
// out the gap in the guest's addresses.
type Run struct{ Start, Length uint64 }

// End is the first offset after the run.
func (r Run) End() uint64 { return r.Start + r.Length }

// Append adds [start, end) to a list that ends before it. If the last run ends at
// start, Append extends that run.
func Append(runs []Run, start, end uint64) []Run {
	if n := len(runs); n > 0 && runs[n-1].End() == start {
		runs[n-1].Length += end - start
		return runs
	}
	return append(runs, Run{start, end - start})
}

// Sort sorts runs in place.
func Sort(runs []Run) []Run {
	slices.SortFunc(runs, func(a, b Run) int { return cmp.Compare(a.Start, b.Start) })
	return runs
}

// Unite returns the bytes that are in at least one of the lists, which need not be
// sorted. Adjacent runs become one.
func Unite(lists ...[]Run) []Run {
	var out []Run
	for _, r := range Sort(slices.Concat(lists...)) {
		if n := len(out); n > 0 && r.Start <= out[n-1].End() {
			out[n-1].Length = max(out[n-1].End(), r.End()) - out[n-1].Start
			continue
		}
		out = append(out, r)
	}
	return out
}

// Intersect returns the bytes that are in both lists.
func Intersect(a, b []Run) []Run {
	var out []Run
	for len(a) > 0 && len(b) > 0 {
		if start, end := max(a[0].Start, b[0].Start), min(a[0].End(), b[0].End()); start < end {
			out = append(out, Run{start, end - start})
		}
		if a[0].End() <= b[0].End() {
			a = a[1:]
		} else {
			b = b[1:]
		}
	}
	return out
}

// Subtract returns the bytes that are in runs and not in cuts.
func Subtract(runs, cuts []Run) []Run {
	var out []Run
	for _, r := range runs {
		for len(cuts) > 0 && cuts[0].End() <= r.Start {
			cuts = cuts[1:]
		}
		// The last cut of this run may reach into the next one.
		for _, c := range cuts {
			if c.Start >= r.End() {
				break
			}
			if c.Start > r.Start {
				out = append(out, Run{r.Start, c.Start - r.Start})
			}
			start := min(c.End(), r.End())
			r = Run{start, r.End() - start}
		}
		if r.Length > 0 {
			out = append(out, r)
		}
	}
	return out
}

// Total is the sum of the runs' lengths.
func Total(runs []Run) (bytes uint64) {
	for _, r := range runs {
		bytes += r.Length
	}
	return bytes
}

// Check checks a list that another process has sent: it has at most most runs, which
// consist of whole pages, are sorted, disjoint and inside size bytes. So their
// lengths add up to at most size.
func Check(runs []Run, size uint64, most int) error {
	if len(runs) > most {
		return fmt.Errorf("%d runs: at most %d are possible", len(runs), most)
	}
	var end uint64
	for i, r := range runs {
		switch {
		case r.Start%PageSize != 0 || r.Length%PageSize != 0 || r.Length == 0:
			return fmt.Errorf("run %d (%#x+%#x): not in whole pages", i, r.Start, r.Length)
		case r.Start < end:
			return fmt.Errorf("run %d starts at %#x, before the end %#x of the one before", i, r.Start, end)
		case r.Start > size || r.Length > size-r.Start:
			return fmt.Errorf("run %d (%#x+%#x): beyond the size %#x", i, r.Start, r.Length, size)
		}
		end = r.End()
	}
	return nil
}
