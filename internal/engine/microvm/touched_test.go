package microvm

import (
	"testing"

	"agentrun.dev/internal/layer"
	"agentrun.dev/internal/snapshot"
)

// TestTouched: one fork of a snapshot is asked; if it has ended before it could
// answer, another one is.
func TestTouched(t *testing.T) {
	j := openJail(t)
	var m touched
	id := snapshot.ID{1}
	dead, live := startBare(t, j), startBare(t, j)
	dead.Kill()
	// A guest that was booted, and is no fork, may have huge pages: then it has
	// many, and is no measure for others.
	own, err := live.touched(t.Context())
	if err != nil || len(own) == 0 {
		t.Fatalf("%v, %v", own, err)
	}
	few := pagesOf(own) <= maxTouched
	for _, p := range []*Process{dead, live} {
		if runs, learn := m.of(id); !learn || runs != nil {
			t.Fatalf("%v, learn: %t", runs, learn)
		}
		if _, learn := m.of(id); learn {
			t.Error("two forks are asked")
		}
		if learnt := m.learn(t.Context(), id, p); learnt != (p == live && few) {
			t.Errorf("learnt: %t, of few pages: %t", learnt, few)
		}
	}
	runs, learn := m.of(id)
	if learn || (len(runs) > 0) != few || len(m.known(id)) != len(runs) {
		t.Errorf("%v, learn: %t", runs, learn)
	}
	if m.known(snapshot.ID{2}) != nil {
		t.Error("another snapshot's pages are known")
	}
	for i := range maxTouchedSnapshots {
		m.set(snapshot.ID{3, byte(i)}, []layer.Run{{Length: layer.PageSize}})
	}
	if m.known(id) != nil || len(m.runs) != maxTouchedSnapshots || len(m.order) != maxTouchedSnapshots {
		t.Errorf("%d snapshots are remembered", len(m.runs))
	}
}
