package enginetest

import (
	"testing"

	"agentrun.dev/internal/engine"
)

// testPark: a parked sandbox goes on as a different one each time it is claimed, and
// as itself when it is resumed.
func (s *suite) testPark(t *testing.T) {
	sb := s.fork(t, s.warm, engine.ForkOptions{Hostname: "waits"})
	park := func() {
		t.Helper()
		if err := sb.Park(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for generation, name := range []string{"first", "second"} {
		park()
		if err := sb.Claim(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		if got := sh(t, sb, "hostname"); got != name {
			t.Errorf("claimed as %q, it is %q", name, got)
		}
		if st, err := sb.Stats(t.Context()); err != nil || st.Generation != uint64(2+generation) {
			t.Errorf("claim %d made generation %d (%v)", generation+1, st.Generation, err)
		}
	}
	park()
	if err := sb.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := sh(t, sb, "hostname; cat /warm"); got != "second\nwarmed up" {
		t.Errorf("resumed, it says %q", got)
	}
	park()
	if err := sb.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := sb.Claim(t.Context(), ""); err != nil {
		t.Fatal(err)
	}
	if got := sh(t, sb, "hostname"); got != "second" {
		t.Errorf("claimed without a name, it is %q", got)
	}
}
