package microvm

import (
	"reflect"
	"testing"

	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/internal/vmm/vmmctl"
)

// TestTouched: two forks of a snapshot are asked. If one has ended before it could
// answer, another fork is asked. Until both have answered, no pages are known.
func TestTouched(t *testing.T) {
	j := openJail(t)
	var m touched
	about := subject{snapshot: snapshot.ID{1}}
	dead, live := startBare(t, j), startBare(t, j)
	dead.Kill()
	// A booted guest, unlike a fork, may have huge pages. Then it has many pages, and
	// is not typical for forks.
	pages, err := live.Touched(t.Context())
	if err != nil || len(pages.Written) == 0 || len(pages.Read) != 0 {
		t.Fatalf("%v, %v", pages, err)
	}
	few := extent.Total(pages.Written) <= maxTouched*extent.PageSize
	if pages, learn := m.of(about); !learn || pages.Written != nil {
		t.Fatalf("%v, learn: %t", pages, learn)
	}
	for _, p := range []*process.Process{dead, live, live} {
		told := m.lessons[about].told
		if pages, learn := m.of(about); learn == (told > 0) || pages.Written != nil {
			t.Fatalf("%v, learn: %t", pages, learn)
		}
		if pages, learn := m.of(about); learn || pages.Written != nil {
			t.Errorf("%v, three forks are asked: %t", pages, learn)
		}
		if learnt := m.learn(t.Context(), about, p); learnt != (told == 1 && few) {
			t.Errorf("learnt: %t, of few pages: %t", learnt, few)
		}
	}
	pages, learn := m.of(about)
	if learn || (len(pages.Written) > 0) != few || len(m.known(about.snapshot).Written) != len(pages.Written) {
		t.Errorf("%v, learn: %t", pages, learn)
	}
	if m.known(snapshot.ID{2}).Written != nil {
		t.Error("another snapshot's pages are known")
	}
	for i := range maxSubjects {
		m.of(subject{snapshot: snapshot.ID{3, byte(i)}})
	}
	if m.known(about.snapshot).Written != nil || len(m.lessons) != maxSubjects || len(m.order) != maxSubjects {
		t.Errorf("%d subjects are remembered", len(m.lessons))
	}
	if m.learn(t.Context(), about, live) {
		t.Error("learnt of a snapshot that is not remembered")
	}
	m.forget(about)
}

// TestRehearsedSubject: forks that rehearse are asked even if other forks have been
// asked. They are given no pages until then. All later forks get the pages that they
// report.
func TestRehearsedSubject(t *testing.T) {
	id := snapshot.ID{1}
	run := func(page uint64) vmmctl.Touched {
		return vmmctl.Touched{Written: []extent.Run{{Start: page, Length: 1}}, Read: []extent.Run{{Start: page + 1, Length: 1}}}
	}
	m := touched{lessons: map[subject]*lesson{{id, false}: {asked: ForksAsked, told: ForksAsked, pages: run(1)}}}
	for range ForksAsked {
		if pages, learn := m.of(subject{id, true}); !learn || pages.Written != nil {
			t.Errorf("%v, learn: %t", pages, learn)
		}
		if pages, learn := m.of(subject{id, false}); learn || !reflect.DeepEqual(pages, run(1)) {
			t.Errorf("%v, learn: %t", pages, learn)
		}
	}
	// The rehearsals touched too many pages, so the pages known before stay in use.
	m.lessons[subject{id, true}] = &lesson{asked: ForksAsked, told: ForksAsked}
	for _, rehearsed := range []bool{true, false} {
		if pages, learn := m.of(subject{id, rehearsed}); learn || !reflect.DeepEqual(pages, run(1)) {
			t.Errorf("rehearsed: %t: %v, learn: %t", rehearsed, pages, learn)
		}
	}
	m.lessons[subject{id, true}].pages = run(8)
	for _, rehearsed := range []bool{true, false} {
		if pages, learn := m.of(subject{id, rehearsed}); learn || !reflect.DeepEqual(pages, run(8)) {
			t.Errorf("rehearsed: %t: %v, learn: %t", rehearsed, pages, learn)
		}
	}
	if pages := m.known(id); !reflect.DeepEqual(pages, run(8)) {
		t.Errorf("%v", pages)
	}
}
