package bench

import (
	"testing"
	"time"
)

// TestSlowest: the duration of a part of the slowest writes.
func TestSlowest(t *testing.T) {
	w := writes{khz: 1_000_000, longest: 900 * time.Nanosecond} // a tick is a nanosecond
	w.classes[0] = 1000                                         // 4 ticks
	w.classes[4*4+1] = 90                                       // 80 to 95
	w.classes[4*7+3] = 10                                       // 896 to 1023
	for _, tt := range []struct {
		n    uint64
		part float64
		want time.Duration
	}{
		{100, 0.5, 96}, {100, 0.99, 900}, {100, 0.89, 96}, {10, 0.5, 900}, {1000, 0.5, 5}, {0, 0.5, 900},
	} {
		if got := w.slowest(tt.n, tt.part); got != tt.want {
			t.Errorf("%v of the %d slowest: %v, want %v", tt.part, tt.n, got, tt.want)
		}
	}
	if got := new(writes).slowest(10, 0.99); got != 0 {
		t.Errorf("of nothing: %v", got)
	}
	if inTime(5, 0) != 0 {
		t.Error("a TSC without a frequency tells time")
	}
}

func TestStallsOfNothing(t *testing.T) {
	var s stallSamples
	s.add(1, 2, 3)
	if got := s.summarize(); got.P50.N != 1 || got.Longest.N != 1 || len(got.rows("name", "")) != 3 {
		t.Errorf("%+v", got)
	}
}
