package layer_test

import (
	"math"
	"testing"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
)

// TestCheckChange has one case for each false description of a layer.
func TestCheckChange(t *testing.T) {
	const p = layer.PageSize
	many := make([]extent.Run, layer.MaxRuns+1)
	for i := range many {
		many[i] = extent.Run{Start: uint64(i) * 2 * p, Length: p}
	}
	size := uint64(1 << 20)
	for name, c := range map[string]struct {
		runs, zeros []extent.Run
		ok          bool
	}{
		"nothing":           {ok: true},
		"runs and zeros":    {runs: []extent.Run{{Start: 0, Length: p}, {Start: p, Length: p}, {Start: 4 * p, Length: p}}, zeros: []extent.Run{{Start: 2 * p, Length: 2 * p}, {Start: size - p, Length: p}}, ok: true},
		"the largest count": {runs: many[:layer.MaxRuns], ok: true},
		"too many":          {runs: many},
		"too many zeros":    {zeros: many},
		"empty":             {runs: []extent.Run{{Start: p, Length: 0}}},
		"start in a page":   {runs: []extent.Run{{Start: 1, Length: p}}},
		"length in a page":  {runs: []extent.Run{{Start: 0, Length: p + 1}}},
		"unsorted":          {runs: []extent.Run{{Start: p, Length: p}, {Start: 0, Length: p}}},
		"overlapping":       {runs: []extent.Run{{Start: 0, Length: 2 * p}, {Start: p, Length: p}}},
		"twice the same":    {runs: []extent.Run{{Start: 0, Length: p}, {Start: 0, Length: p}}},
		"behind the end":    {runs: []extent.Run{{Start: size, Length: p}}},
		"over the end":      {runs: []extent.Run{{Start: size - p, Length: 2 * p}}},
		"sum overflows":     {runs: []extent.Run{{Start: math.MaxUint64 - p + 1, Length: p}}},
		"length overflows":  {runs: []extent.Run{{Start: p, Length: math.MaxUint64 - p + 1}}},
		"zeros over a run":  {runs: []extent.Run{{Start: 0, Length: p}, {Start: 4 * p, Length: 4 * p}}, zeros: []extent.Run{{Start: 2 * p, Length: p}, {Start: 7 * p, Length: 2 * p}}},
		"a run over zeros":  {runs: []extent.Run{{Start: 0, Length: 16 * p}}, zeros: []extent.Run{{Start: 2 * p, Length: p}}},
		"zeros behind":      {zeros: []extent.Run{{Start: size, Length: p}}},
	} {
		if err := layer.CheckChange(c.runs, c.zeros, size); (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}
