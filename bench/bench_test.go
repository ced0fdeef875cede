package bench

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == FloorCommand {
		if err := ServeFloor(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestSummarize(t *testing.T) {
	var sample []time.Duration
	for i := 100; i >= 0; i-- { // 0 to 100 ms, not in order
		sample = append(sample, time.Duration(i)*time.Millisecond)
	}
	given := slices.Clone(sample)
	if got, want := Summarize(sample), (Summary{N: 101, P10: 10, P50: 50, P90: 90, P99: 99}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if !slices.Equal(sample, given) {
		t.Error("the caller's sample was sorted")
	}
	if got := Summarize(nil); got != (Summary{}) {
		t.Errorf("of nothing: %+v", got)
	}
	if got, want := Summarize([]time.Duration{1500 * time.Microsecond}), (Summary{N: 1, P10: 1.5, P50: 1.5, P90: 1.5, P99: 1.5}); got != want {
		t.Errorf("of one: %+v, want %+v", got, want)
	}
	// The nearest rank: of two the median is the upper one.
	if got := Summarize([]time.Duration{time.Millisecond, 3 * time.Millisecond}); got.P10 != 1 || got.P50 != 3 || got.P99 != 3 {
		t.Errorf("of two: %+v", got)
	}
}

func TestNoisy(t *testing.T) {
	for _, c := range []struct {
		s    Summary
		want bool
	}{
		{Summary{P10: 1, P50: 1}, false},
		{Summary{P10: 1, P50: 1.5}, false},
		{Summary{P10: 1, P50: 1.6}, true},
		{Summary{}, false},
	} {
		if got := c.s.Noisy(); got != c.want {
			t.Errorf("%+v: noisy %v", c.s, got)
		}
	}
}

func TestFloor(t *testing.T) {
	f, err := NewFloor()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		d, err := f.Sample()
		if err != nil {
			t.Fatalf("sample %d (this test needs a /dev/kvm of any kind; make test runs it in the testbed where there is none): %v", i, err)
		}
		if d <= 0 {
			t.Errorf("sample %d took %v", i, d)
		}
	}
	if err := f.Close(); err != nil {
		t.Errorf("close the floor: %v", err)
	}
}
