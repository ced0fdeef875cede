package microvm

import (
	"slices"
	"testing"

	"agentrun.dev/internal/layer"
	"agentrun.dev/internal/snapshot"
)

// TestTouched: two forks of a snapshot are asked; if one has ended before it
// could answer, another one is. Until both have told, nothing is populated.
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
	if runs, learn := m.of(id); !learn || runs != nil {
		t.Fatalf("%v, learn: %t", runs, learn)
	}
	for _, p := range []*Process{dead, live, live} {
		told := m.lessons[id].told
		if runs, learn := m.of(id); learn == (told > 0) || runs != nil {
			t.Fatalf("%v, learn: %t", runs, learn)
		}
		if runs, learn := m.of(id); learn || runs != nil {
			t.Errorf("%v, three forks are asked: %t", runs, learn)
		}
		if learnt := m.learn(t.Context(), id, p); learnt != (told == 1 && few) {
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
		m.of(snapshot.ID{3, byte(i)})
	}
	if m.known(id) != nil || len(m.lessons) != maxTouchedSnapshots || len(m.order) != maxTouchedSnapshots {
		t.Errorf("%d snapshots are remembered", len(m.lessons))
	}
	if m.learn(t.Context(), id, live) {
		t.Error("learnt of a snapshot that is not remembered")
	}
	m.forget(id)
}

func TestCommon(t *testing.T) {
	run := func(start, length uint64) layer.Run { return layer.Run{Start: start, Length: length} }
	for name, c := range map[string]struct{ a, b, want []layer.Run }{
		"nothing":       {nil, []layer.Run{run(0, 9)}, nil},
		"the same":      {[]layer.Run{run(1, 2), run(5, 1)}, []layer.Run{run(1, 2), run(5, 1)}, []layer.Run{run(1, 2), run(5, 1)}},
		"beside":        {[]layer.Run{run(0, 2)}, []layer.Run{run(2, 2)}, nil},
		"overlapping":   {[]layer.Run{run(0, 3)}, []layer.Run{run(2, 3)}, []layer.Run{run(2, 1)}},
		"one in many":   {[]layer.Run{run(1, 9)}, []layer.Run{run(0, 2), run(3, 1), run(9, 5)}, []layer.Run{run(1, 1), run(3, 1), run(9, 1)}},
		"many, and one": {[]layer.Run{run(0, 2), run(3, 1), run(9, 5)}, []layer.Run{run(1, 9)}, []layer.Run{run(1, 1), run(3, 1), run(9, 1)}},
	} {
		if got := common(c.a, c.b); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
