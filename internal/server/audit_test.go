package server

import (
	"fmt"
	"testing"
	"time"
)

// TestStrangersAreBounded: a client without a key cannot push the lines of
// others out of the log.
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
	if w, o := count(1000, now); w != refusedBurst || o != 0 {
		t.Errorf("%d, %d", w, o)
	}
	if w, o := count(5, now.Add(2*time.Second)); w != 2 || o != 1000-refusedBurst {
		t.Errorf("%d, %d", w, o)
	}
	if w, o := count(1000, now.Add(time.Hour)); w != refusedBurst || o != 3 {
		t.Errorf("%d, %d", w, o)
	}
}

// TestThrottles: each principal has a bound of its own, and the number of bounds is
// limited.
func TestThrottles(t *testing.T) {
	var all Throttles
	now := time.Now()
	for i := range throttlesAtMost {
		name := fmt.Sprint("key:", i)
		mine := all.Of(name, now)
		if ok, _ := mine.Take(now); !ok || all.Of(name, now) != mine {
			t.Fatalf("%s is refused, or has two", name)
		}
	}
	if late, later := all.Of("late", now), all.Of("later", now); late != later || len(all.all) != throttlesAtMost {
		t.Errorf("there are %d", len(all.all))
	}
	now = now.Add(time.Hour)
	if late, later := all.Of("late", now), all.Of("later", now); late == later || len(all.all) != 2 {
		t.Errorf("there are %d an hour later", len(all.all))
	}
}
