package server

import (
	"testing"
	"time"
)

// TestStrangersAreBounded: who has no key cannot push others out of the log.
func TestStrangersAreBounded(t *testing.T) {
	var th Throttle
	now := time.Now()
	count := func(n int, at time.Time) (written, omitted int) {
		for range n {
			ok, o := th.Take(at)
			if ok {
				written++
			}
			omitted += o
		}
		return written, omitted
	}
	if w, o := count(1000, now); w != strangersBurst || o != 0 {
		t.Errorf("%d, %d", w, o)
	}
	if w, o := count(5, now.Add(2*time.Second)); w != 2 || o != 1000-strangersBurst {
		t.Errorf("%d, %d", w, o)
	}
	if w, o := count(1000, now.Add(time.Hour)); w != strangersBurst || o != 3 {
		t.Errorf("%d, %d", w, o)
	}
}
