package node

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// TestForkAgain: if the daemon was killed before it answered a fork, a repeated request
// makes the fork again with all of its children, and earlier remains have ended.
func TestForkAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		setUp(t, m, 0)
		claim(t, m, "a", sandbox.Lifetime{})
		once := sandbox.NewOnce("p", "r", "k", []byte("body"))
		r := sandbox.ForkRequest{Key: key("try"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 3}, Once: &once}
		first, _, err := m.Fork(t.Context(), r)
		must(t, err)
		must(t, second(m.Hibernate(t.Context(), key("try-3"))))
		// As the journal is before the last transaction of the fork.
		must(t, m.db.Update(func(tx *journal.Tx) error {
			pending := first
			pending.Phase, pending.Children = sandbox.PhasePending, nil
			return errors.Join(forks.Put(tx, first.String(), pending), answers.Delete(tx, once.Key))
		}))
		m.crash()
		m = daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		wantEnded(t, m, "try-1", sandbox.ReasonLost)
		wantEnded(t, m, "try-2", sandbox.ReasonLost)
		wantState(t, m, "try-3", sandbox.Hibernated) // somebody has used it
		must(t, second(m.Kill(t.Context(), key("try-3"))))
		again, replayed, err := m.Fork(t.Context(), r)
		if err != nil || replayed || again.Phase != sandbox.PhaseReady || len(again.Children) != 3 {
			t.Fatalf("%+v, replayed %t, %v", again, replayed, err)
		}
		for i, c := range again.Children {
			if s := wantState(t, m, string(c.Name), sandbox.Running); s.ID != c.ID || s.ID == first.Children[i].ID {
				t.Errorf("%+v is not %+v", s, c)
			}
		}
		if left := h.Folders(); len(left) != 4 {
			t.Errorf("%d machines of 4 sandboxes", len(left))
		}
	})
}

// TestForkWithoutAnswer: a fork whose answer cannot be written has made nothing, and can be
// asked for again.
func TestForkWithoutAnswer(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		r := sandbox.ForkRequest{Key: key("try"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 3}}
		r.Once = &sandbox.Once{Body: "body"} // no key is a key that the journal refuses
		if _, _, err := m.Fork(t.Context(), r); err == nil {
			t.Fatal("an answer without a key was kept")
		}
		wantNoFork(t, m, h)
		r.Once = nil
		f, _, err := m.Fork(t.Context(), r)
		if err != nil || f.Phase != sandbox.PhaseReady || len(f.Children) != 3 {
			t.Fatalf("%+v, %v", f, err)
		}
		wantReserved(t, m, h, 4, 0)
	})
}

// TestDeleteForkBeingMade: a fork that is deleted while it is being made fails, and neither
// it nor a child of it is there.
func TestDeleteForkBeingMade(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		r := sandbox.ForkRequest{Key: key("try"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 3}}
		h.Step = func() {
			h.Step = func() {}
			must(t, m.DeleteFork(t.Context(), key("try")))
		}
		if _, _, err := m.Fork(t.Context(), r); !sandbox.HasCode(err, sandbox.CodeConflict) {
			t.Errorf("a fork that was deleted: %v", err)
		}
		wantNoFork(t, m, h)
		// Whoever deletes it has seen it before it was complete.
		pending := sandbox.Fork{}
		h.Step = func() {
			h.Step = func() {}
			var err error
			pending, err = m.ForkOf(t.Context(), key("try"))
			must(t, err)
		}
		must(t, third(m.Fork(t.Context(), r)))
		now, forgotten, err := m.forgetForkAsIs(pending)
		if err != nil || forgotten || len(now.Children) != 3 {
			t.Errorf("%+v, forgotten %t, %v", now, forgotten, err)
		}
		must(t, m.DeleteFork(t.Context(), key("try")))
		wantNoFork(t, m, h)
	})
}

// wantNoFork checks that the fork "try" of the only sandbox has left no trace.
func wantNoFork(t *testing.T, m *Manager, h *nodetest.Host) {
	t.Helper()
	if _, err := m.ForkOf(t.Context(), key("try")); !sandbox.HasCode(err, sandbox.CodeNotFound) {
		t.Errorf("the fork is there: %v", err)
	}
	for i := range 3 {
		if s, err := m.Sandbox(t.Context(), key(fmt.Sprintf("try-%d", i+1))); err == nil {
			t.Errorf("a child is there: %+v", s)
		}
	}
	if left := h.Folders(); len(left) != 1 {
		t.Errorf("%d machines of one sandbox", len(left))
	}
	wantReserved(t, m, h, 1, 0)
}

// TestForkOfTaken: a fork whose children's names are taken says so.
func TestForkOfTaken(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		claim(t, m, "f-1", sandbox.Lifetime{})
		_, _, err := m.Fork(t.Context(), sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}})
		if !sandbox.HasCode(err, sandbox.CodeExists) {
			t.Errorf("%v", err)
		}
	})
}

// TestForksAreForgotten: a fork is remembered while a child of it lives, and for a day.
// The number of a namespace's forks without living children is bounded.
func TestForksAreForgotten(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		for i := range 3 {
			_, _, err := m.Fork(t.Context(), sandbox.ForkRequest{Key: key(fmt.Sprintf("f%d", i)), Spec: sandbox.ForkSpec{Source: "a", Replicas: 2}})
			must(t, err)
		}
		for _, name := range []string{"f0-1", "f0-2", "f1-1"} {
			must(t, second(m.Kill(t.Context(), key(name))))
		}
		h.End(m.machineDir(wantState(t, m, "f2-1", sandbox.Running).Machine), engine.ErrOutOfMemory)
		has := func(want ...string) {
			t.Helper()
			all, err := m.Forks(t.Context(), sandbox.DefaultNamespace, sandbox.Page{Limit: 1000})
			var got []string
			for _, f := range all {
				got = append(got, string(f.Name))
			}
			if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
				t.Fatalf("there are %v, want %v, %v", got, want, err)
			}
		}
		time.Sleep(keptForks - 2*forksEvery)
		has("f0", "f1", "f2")
		time.Sleep(4 * forksEvery)
		has("f1", "f2")
		must(t, second(m.Kill(t.Context(), key("f1-2"))))
		time.Sleep(2 * forksEvery)
		has("f2")
		// Whoever makes many forgets those before.
		now := time.Now()
		must(t, m.db.Update(func(tx *journal.Tx) error {
			var errs []error
			for i := range historyForks + 100 {
				f := sandbox.Fork{Key: key(fmt.Sprintf("g%04d", i)), Phase: sandbox.PhaseReady, Created: now.Add(time.Duration(i)), Children: []sandbox.ForkOutcome{{ID: sandbox.NewID()}}}
				other := f
				other.Namespace, other.Children = "other", make([]sandbox.ForkOutcome, 100)
				errs = append(errs, forks.Put(tx, f.String(), f), forks.Put(tx, other.String(), other))
			}
			return errors.Join(errs...)
		}))
		for range forksAfter {
			m.noteFork()
		}
		synctest.Wait()
		for n, want := range map[sandbox.Namespace]int{sandbox.DefaultNamespace: historyForks + 1, "other": forkChildren / 100} {
			count := 0
			must(t, m.db.View(func(tx *journal.Tx) error {
				return forks.Each(tx, string(n)+"/", func(string, sandbox.Fork) error { count++; return nil })
			}))
			if count != want {
				t.Errorf("%d forks of %s, want %d", count, n, want)
			}
		}
		if _, err := m.ForkOf(t.Context(), key("g0099")); !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Errorf("the oldest: %v", err)
		}
		if _, err := m.ForkOf(t.Context(), key("g0100")); err != nil {
			t.Error(err)
		}
	})
}
