package bench

import (
	"context"
	"errors"
	"testing"
	"time"
)

func TestLongestGap(t *testing.T) {
	k := newTicks()
	start := time.Unix(0, 0)
	for _, at := range []int{0, 50, 60, 90, 95} { // a long silence before the fork does not count
		k.at = append(k.at, start.Add(time.Duration(at)*time.Millisecond))
	}
	if got := k.longestGap(1); got != 30*time.Millisecond {
		t.Errorf("the longest gap from the second tick on is %v", got)
	}
	if got := k.longestGap(4); got != 0 {
		t.Errorf("after the last tick: %v", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := k.hear(ctx, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("a tick that never came: %v", err)
	}
	heard := make(chan error, 1)
	go func() { heard <- k.hear(t.Context(), 2) }()
	for range 3 {
		if _, err := k.Write([]byte("\n")); err != nil {
			t.Fatal(err)
		}
	}
	// The listener may have begun after some of the ticks.
	for {
		select {
		case err := <-heard:
			if err != nil {
				t.Error(err)
			}
			return
		default:
			_, _ = k.Write([]byte("\n"))
		}
	}
}
