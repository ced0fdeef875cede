package extent

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestCoalesce(t *testing.T) {
	const p = PageSize
	for _, c := range []struct {
		name string
		in   []Run
		most int
		want []Run
	}{
		{"nothing", nil, 3, nil},
		{"adjacent", []Run{{0, p}, {p, p}, {3 * p, p}}, 9, []Run{{0, 2 * p}, {3 * p, p}}},
		{"smallest gap", []Run{{0, p}, {5 * p, p}, {7 * p, p}}, 2, []Run{{0, p}, {5 * p, 3 * p}}},
		{"first of equals", []Run{{0, p}, {2 * p, p}, {4 * p, p}}, 2, []Run{{0, 3 * p}, {4 * p, p}}},
		{"at least one", []Run{{0, p}, {9 * p, p}}, 0, []Run{{0, 10 * p}}},
		{"empty runs", []Run{{0, p}, {2 * p, 0}, {4 * p, p}}, 9, []Run{{0, p}, {4 * p, p}}},
	} {
		if got := Coalesce(c.in, c.most); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// randomRuns makes sorted and disjoint runs, some of them adjacent.
func randomRuns(r *rand.Rand, pages uint64, most int) []Run {
	var runs []Run
	var at uint64
	for range r.IntN(most + 1) {
		at += uint64(r.IntN(int(2*pages/uint64(most)) + 1))
		n := uint64(1 + r.IntN(3))
		if at+n > pages {
			break
		}
		runs = append(runs, Run{at * PageSize, n * PageSize})
		at += n
	}
	return runs
}

// TestCoalesceIsOptimal compares the cost with the sum of the smallest gaps.
func TestCoalesceIsOptimal(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 2000 {
		runs := randomRuns(r, 400, 90)
		before := slices.Clone(runs)
		most := 1 + r.IntN(64)
		got := Coalesce(runs, most)
		if !slices.Equal(runs, before) {
			t.Fatal("the argument was changed")
		}
		if err := Check(got, 400*PageSize, most); err != nil {
			t.Fatalf("%d runs of at most %d: %v", len(got), most, err)
		}
		joined := map[uint64]bool{}
		var cost uint64
		for _, g := range got {
			cost += g.Length
			for at := g.Start; at < g.End(); at += PageSize {
				joined[at] = true
			}
		}
		var gaps []uint64
		for i, run := range runs {
			cost -= run.Length
			for at := run.Start; at < run.End(); at += PageSize {
				if !joined[at] {
					t.Fatalf("page %#x was lost", at)
				}
			}
			if i > 0 {
				gaps = append(gaps, run.Start-runs[i-1].End())
			}
		}
		slices.Sort(gaps)
		for i := 0; i < len(runs)-most; i++ {
			cost -= gaps[i]
		}
		if cost != 0 {
			t.Fatalf("%d bytes more than necessary", int64(cost))
		}
	}
}

func TestIntersect(t *testing.T) {
	for name, c := range map[string]struct{ a, b, want []Run }{
		"nothing":       {nil, []Run{{0, 9}}, nil},
		"the same":      {[]Run{{1, 2}, {5, 1}}, []Run{{1, 2}, {5, 1}}, []Run{{1, 2}, {5, 1}}},
		"beside":        {[]Run{{0, 2}}, []Run{{2, 2}}, nil},
		"overlapping":   {[]Run{{0, 3}}, []Run{{2, 3}}, []Run{{2, 1}}},
		"one in many":   {[]Run{{1, 9}}, []Run{{0, 2}, {3, 1}, {9, 5}}, []Run{{1, 1}, {3, 1}, {9, 1}}},
		"many, and one": {[]Run{{0, 2}, {3, 1}, {9, 5}}, []Run{{1, 9}}, []Run{{1, 1}, {3, 1}, {9, 1}}},
	} {
		if got := Intersect(c.a, c.b); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// TestSets compares the operations with sets of pages.
func TestSets(t *testing.T) {
	const pages = 60
	r := rand.New(rand.NewPCG(1, 2))
	in := func(runs []Run) (set [pages]bool) {
		for _, run := range runs {
			for at := run.Start; at < run.End(); at += PageSize {
				set[at/PageSize] = true
			}
		}
		return set
	}
	for range 2000 {
		a, b := randomRuns(r, pages, 12), randomRuns(r, pages, 12)
		wasA, wasB := slices.Clone(a), slices.Clone(b)
		both, either, left := Intersect(a, b), Unite(b, a), Subtract(a, b)
		if !slices.Equal(a, wasA) || !slices.Equal(b, wasB) {
			t.Fatal("an argument was changed")
		}
		inA, inB, inBoth, inEither, inLeft := in(a), in(b), in(both), in(either), in(left)
		for i := range pages {
			if inBoth[i] != (inA[i] && inB[i]) || inEither[i] != (inA[i] || inB[i]) || inLeft[i] != (inA[i] && !inB[i]) {
				t.Fatalf("page %d of %v and %v: both %v, either %v, left %v", i, a, b, both, either, left)
			}
		}
		for _, list := range [][]Run{both, either, left} {
			if err := Check(list, pages*PageSize, pages); err != nil {
				t.Fatal(err)
			}
		}
		if joined, _ := Gaps(either); !slices.Equal(joined, either) {
			t.Fatalf("runs that touch are left in %v", either)
		}
		if Total(both)+Total(either) != Total(a)+Total(b) {
			t.Fatalf("totals of %v and %v", a, b)
		}
	}
}

func TestCheck(t *testing.T) {
	const p = PageSize
	for name, c := range map[string]struct {
		runs []Run
		ok   bool
	}{
		"nothing":          {nil, true},
		"two":              {[]Run{{0, p}, {p, p}}, true},
		"too many":         {[]Run{{0, p}, {p, p}, {2 * p, p}}, false},
		"empty":            {[]Run{{p, 0}}, false},
		"start in a page":  {[]Run{{1, p}}, false},
		"length in a page": {[]Run{{0, p + 1}}, false},
		"unsorted":         {[]Run{{p, p}, {0, p}}, false},
		"overlapping":      {[]Run{{0, 2 * p}, {p, p}}, false},
		"over the end":     {[]Run{{7 * p, 2 * p}}, false},
		"sum overflows":    {[]Run{{math.MaxUint64 - p + 1, p}}, false},
	} {
		if err := Check(c.runs, 8*p, 2); (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}
