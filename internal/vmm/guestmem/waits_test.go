package guestmem

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// TestWaits: each quantile equals that of the sample, or is at most a quarter
// larger.
func TestWaits(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var w Waits
	var sample []time.Duration
	for range 5000 {
		d := time.Duration(random.Int64N(1 << (10 + random.Int64N(24))))
		w.Add(d)
		sample = append(sample, d)
	}
	slices.Sort(sample)
	if w.Count() != uint64(len(sample)) || w.Longest() != sample[len(sample)-1] {
		t.Errorf("%d, the longest %v", w.Count(), w.Longest())
	}
	for _, q := range []float64{0.01, 0.5, 0.9, 0.99, 1} {
		exact, got := sample[int(q*float64(len(sample)))-1], w.Quantile(q)
		if got < exact || got > exact+max(exact/4, waitUnit) {
			t.Errorf("quantile %v: %v, the sample's is %v", q, got, exact)
		}
	}
}

func TestWaitsBounds(t *testing.T) {
	var none Waits
	if none.Quantile(0.5) != 0 || none.Count() != 0 {
		t.Error("there is something in nothing")
	}
	for class := range waitClasses - 1 {
		if got := waitClass(waitLimit(class)); got != class+1 {
			t.Errorf("what is beyond class %d is in %d", class, got)
		}
		if got := waitClass(waitLimit(class) - 1); got != class {
			t.Errorf("the last of class %d is in %d", class, got)
		}
	}
	var w Waits
	w.Add(-time.Second)
	w.Add(1<<63 - 1)
	if w.Count() != 2 || w.Quantile(1) != waitLimit(waitClasses-1) {
		t.Errorf("%d, %v", w.Count(), w.Quantile(1))
	}
	if n := testing.AllocsPerRun(100, func() { w.Add(time.Millisecond) }); n != 0 {
		t.Errorf("to count costs %v allocations", n)
	}
}
