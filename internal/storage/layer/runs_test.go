package layer

import (
	"math"
	"testing"
)

// TestCheckChange: one case for each lie about a layer.
func TestCheckChange(t *testing.T) {
	const p = PageSize
	many := make([]Run, MaxRuns+1)
	for i := range many {
		many[i] = Run{uint64(i) * 2 * p, p}
	}
	size := uint64(1 << 20)
	for name, c := range map[string]struct {
		runs, zeros []Run
		ok          bool
	}{
		"nothing":           {ok: true},
		"runs and zeros":    {runs: []Run{{0, p}, {p, p}, {4 * p, p}}, zeros: []Run{{2 * p, 2 * p}, {size - p, p}}, ok: true},
		"the largest count": {runs: many[:MaxRuns], ok: true},
		"too many":          {runs: many},
		"too many zeros":    {zeros: many},
		"empty":             {runs: []Run{{p, 0}}},
		"start in a page":   {runs: []Run{{1, p}}},
		"length in a page":  {runs: []Run{{0, p + 1}}},
		"unsorted":          {runs: []Run{{p, p}, {0, p}}},
		"overlapping":       {runs: []Run{{0, 2 * p}, {p, p}}},
		"twice the same":    {runs: []Run{{0, p}, {0, p}}},
		"behind the end":    {runs: []Run{{size, p}}},
		"over the end":      {runs: []Run{{size - p, 2 * p}}},
		"sum overflows":     {runs: []Run{{math.MaxUint64 - p + 1, p}}},
		"length overflows":  {runs: []Run{{p, math.MaxUint64 - p + 1}}},
		"zeros over a run":  {runs: []Run{{0, p}, {4 * p, 4 * p}}, zeros: []Run{{2 * p, p}, {7 * p, 2 * p}}},
		"a run over zeros":  {runs: []Run{{0, 16 * p}}, zeros: []Run{{2 * p, p}}},
		"zeros behind":      {zeros: []Run{{size, p}}},
	} {
		if err := CheckChange(c.runs, c.zeros, size); (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}
