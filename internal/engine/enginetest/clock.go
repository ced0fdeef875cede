package enginetest

import (
	"testing"
	"time"

	"agentrun.dev/internal/engine"
)

// setBack sets a sandbox's wall clock back by an hour, as if it had stood still
// for that long, and returns a check that it is right again. In a sandbox whose
// clock is the host's nobody can set it; there the check is that a pause of some
// seconds does not show.
func (s *suite) setBack(t *testing.T, sb engine.Sandbox) (check func(*testing.T)) {
	t.Helper()
	tolerance := 2 * time.Second // of which one is that date tells no less
	if sh(t, sb, `date -s @$(($(date +%s) - 3600)) >/dev/null 2>&1 && echo set || true`) == "set" {
		tolerance = time.Minute
	}
	return func(t *testing.T) {
		t.Helper()
		before := time.Now()
		now := time.Unix(int64(number(t, sh(t, sb, "date +%s"))), 0)
		after := time.Now()
		if now.Before(before.Add(-tolerance)) || now.After(after.Add(tolerance)) {
			t.Errorf("the wall clock says %v after the sandbox was resumed; the host's went from %v to %v meanwhile", now, before, after)
		}
	}
}
