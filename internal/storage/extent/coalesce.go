package extent

import "slices"

// Coalesce joins neighbouring runs over the smallest gaps until at most most runs
// (at least one) are left. It always joins adjacent runs and drops empty ones.
func Coalesce(runs []Run, most int) []Run {
	runs, gaps := Gaps(runs)
	return CloseSmallest(runs, gaps, len(runs)-max(most, 1))
}

// Gaps joins adjacent runs, drops empty ones, and lists the sizes of the remaining
// gaps in ascending order.
func Gaps(runs []Run) (joined []Run, gaps []uint64) {
	joined = joinGaps(runs, func(gap uint64) bool { return gap == 0 })
	for i := 1; i < len(joined); i++ {
		gaps = append(gaps, joined[i].Start-joined[i-1].End())
	}
	slices.Sort(gaps)
	return joined, gaps
}

// CloseSmallest closes the n smallest of the gaps that Gaps has listed.
func CloseSmallest(runs []Run, gaps []uint64, n int) []Run {
	if n <= 0 {
		return runs
	}
	limit := gaps[n-1]
	// Of the gaps that are exactly as large as the limit, only as many as
	// needed are closed.
	below, _ := slices.BinarySearch(gaps, limit)
	ties := n - below
	return joinGaps(runs, func(gap uint64) bool {
		if gap == limit {
			ties--
			return ties >= 0
		}
		return gap < limit
	})
}

// joinGaps joins neighbours if join accepts the gap between them.
func joinGaps(runs []Run, join func(gap uint64) bool) []Run {
	var out []Run
	for _, r := range runs {
		if r.Length == 0 {
			continue
		}
		if n := len(out); n > 0 && join(r.Start-out[n-1].End()) {
			out[n-1].Length = r.End() - out[n-1].Start
			continue
		}
		out = append(out, r)
	}
	return out
}
