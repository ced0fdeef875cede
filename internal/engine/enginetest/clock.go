package enginetest

import (
	"testing"
	"time"

	"agentrun.dev/internal/engine"
)

// late is how far setBack sets a clock back.
const late = time.Hour

// setBack sets a sandbox's wall clock back, as if it had stood still for an hour, and
// returns a check that it is right again. If the sandbox's clock is the host's,
// nobody can set it. The check is then that a pause of some seconds leaves no trace.
func setBack(t *testing.T, sb engine.Sandbox) (check func(*testing.T)) {
	t.Helper()
	tolerance := 2 * time.Second // date rounds down to whole seconds, which accounts for one of them
	if sh(t, sb, `date -s @$(($(date +%s) - 3600)) >/dev/null 2>&1 && echo set || true`) == "set" {
		tolerance = late / 2
	}
	return func(t *testing.T) {
		t.Helper()
		if off := clockOff(t, sb); off > tolerance {
			t.Errorf("the wall clock is %v off the host's after the sandbox was resumed", off)
		}
	}
}

// clockOff is how far a sandbox's wall clock is from the host's.
func clockOff(t *testing.T, sb engine.Sandbox) time.Duration {
	t.Helper()
	before := time.Now()
	now := time.Unix(int64(number(t, sh(t, sb, "date +%s"))), 0)
	return max(before.Sub(now), time.Until(now), 0)
}

// testClock: after a sandbox has stood still, its wall clock is the host's, whoever
// resumes it. Resuming a running sandbox does not touch its clock.
func (s *suite) testClock(t *testing.T) {
	dir := folder(t)
	sb := s.fork(t, s.warm, engine.ForkOptions{Folder: dir})
	for range 2 {
		check := setBack(t, sb)
		if err := sb.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
		resume(t, sb)
		check(t)
	}
	setBack(t, sb)
	if err := sb.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	sb = s.leave(t, sb, dir)
	resume(t, sb)
	if off := clockOff(t, sb); off > late/2 {
		t.Errorf("the wall clock is %v off the host's after somebody else has resumed the sandbox", off)
	}
	setBack(t, sb)
	was := clockOff(t, sb)
	resume(t, sb) // it already runs
	sb = s.leave(t, sb, dir)
	resume(t, sb)
	if off := clockOff(t, sb); (off > late/2) != (was > late/2) {
		t.Errorf("a sandbox that ran all the time was %v off the host's clock, and then %v", was, off)
	}
}
