package node

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// TestOnce: a request that comes again gets what it got, over a restart too,
// for a day; another body under the same key is refused.
func TestOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 2)
		once := sandbox.NewOnce("me", "claim", "k", []byte("body"))
		spec := sandbox.ClaimSpec{Pool: "pool"}
		first, replayed, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key("a"), Spec: spec, Once: &once})
		if err != nil || replayed {
			t.Fatalf("%v, replayed %v", err, replayed)
		}
		again, replayed, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key("another"), Spec: spec, Once: &once})
		if err != nil || !replayed || again.ID != first.ID || again.Name != "a" {
			t.Errorf("%+v, %v, replayed %v", again, err, replayed)
		}
		if _, _, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key("b"), Spec: spec, Once: new(sandbox.NewOnce("me", "claim", "k", []byte("other")))}); !sandbox.HasCode(err, sandbox.CodeConflict) {
			t.Errorf("another body: %v", err)
		}
		if s, replayed, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key("c"), Spec: spec, Once: new(sandbox.NewOnce("you", "claim", "k", []byte("body")))}); err != nil || replayed || s.Name != "c" {
			t.Errorf("another principal: %+v, %v", s, err)
		}
		fork := sandbox.NewOnce("me", "fork", "k", []byte("body"))
		f, replayed, err := m.Fork(t.Context(), sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 2}, Once: &fork})
		if err != nil || replayed {
			t.Fatalf("%v, replayed %v", err, replayed)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		m = daemon(t, dir, h)
		if again, replayed, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key("d"), Spec: spec, Once: &once}); err != nil || !replayed || again.ID != first.ID {
			t.Errorf("after a restart: %+v, %v, replayed %v", again, err, replayed)
		}
		if again, replayed, err := m.Fork(t.Context(), sandbox.ForkRequest{Key: key("g"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 2}, Once: &fork}); err != nil || !replayed || again.Children[1].ID != f.Children[1].ID {
			t.Errorf("a fork after a restart: %+v, %v, replayed %v", again, err, replayed)
		}
		time.Sleep(keepAnswers)
		synctest.Wait()
		if s, replayed, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key("e"), Spec: spec, Once: &once}); err != nil || replayed || s.ID == first.ID {
			t.Errorf("a day later: %+v, %v, replayed %v", s, err, replayed)
		}
		kept := 0
		_ = m.db.View(func(tx *journal.Tx) error {
			return answers.Each(tx, "", func(string, keptAnswer) error { kept++; return nil })
		})
		if kept != 1 {
			t.Errorf("%d answers are kept", kept)
		}
	})
}

// TestOnceAtOnce: of requests with one key that come together one is done, and
// if it fails another.
func TestOnceAtOnce(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		h.FailNext(errors.New("no luck"))
		once := sandbox.NewOnce("me", "claim", "k", nil)
		var mu sync.Mutex
		ids, failed := map[sandbox.ID]int{}, 0
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				s, _, err := m.Claim(context.Background(), sandbox.ClaimRequest{Key: key(string(sandbox.NewName("x"))), Spec: sandbox.ClaimSpec{Pool: "pool"}, Once: &once})
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					failed++
					return
				}
				ids[s.ID]++
			})
		}
		all.Wait()
		if len(ids) != 1 || failed != 1 {
			t.Errorf("%v, and %d failed", ids, failed)
		}
		if got, err := m.Sandboxes(t.Context(), sandbox.SandboxesRequest{Namespace: sandbox.DefaultNamespace, Page: sandbox.Page{}, Ended: true}); err != nil || len(got) != 1 {
			t.Errorf("%d sandboxes, %v", len(got), err)
		}
	})
}

// TestOnceCrash: the daemon is killed at every step of a claim and a fork.
// Afterwards either the answer and its objects are there, or neither.
func TestOnceCrash(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		m := daemon(t, t.TempDir(), h)
		setUp(t, m, 0)
		claimOnce, forkOnce := sandbox.NewOnce("me", "claim", "k", nil), sandbox.NewOnce("me", "fork", "k", nil)
		steps := 0
		look := func() {
			steps++
			err := m.db.View(func(tx *journal.Tx) error {
				claimed, found, err := answers.Get(tx, claimOnce.Key)
				if err != nil {
					return err
				}
				if found {
					if s, there, err := sandboxes.Get(tx, string(claimed.Sandbox.ID)); err != nil || !there || s.State == sandbox.Starting {
						t.Errorf("step %d: the answer names a sandbox that is not there: %+v, %v", steps, s, err)
					}
				}
				forked, found, err := answers.Get(tx, forkOnce.Key)
				if found {
					if f, there, err := forks.Get(tx, forked.Fork.String()); err != nil || !there || f.Phase != sandbox.PhaseReady {
						t.Errorf("step %d: the answer names a fork that is not there: %+v, %v", steps, f, err)
					}
				}
				return err
			})
			if err != nil {
				t.Error(err)
			}
		}
		h.Step = look
		if _, _, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key("a"), Spec: sandbox.ClaimSpec{Pool: "pool"}, Once: &claimOnce}); err != nil {
			t.Fatal(err)
		}
		if _, _, err := m.Fork(t.Context(), sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 3}, Once: &forkOnce}); err != nil {
			t.Fatal(err)
		}
		h.Step = nil
		look()
		if steps < 5 {
			t.Errorf("looked %d times", steps)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestOnceAfterTheEnd: a repeated claim returns the present state of its sandbox.
func TestOnceAfterTheEnd(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		r := sandbox.ClaimRequest{Key: key("a"), Spec: sandbox.ClaimSpec{Pool: "pool"}, Once: new(sandbox.NewOnce("me", "claim", "k", []byte("body")))}
		first, _, err := m.Claim(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := m.Hibernate(t.Context(), key("a")); err != nil {
			t.Fatal(err)
		}
		if s, replayed, err := m.Claim(t.Context(), r); err != nil || !replayed || s.ID != first.ID || s.State != sandbox.Hibernated {
			t.Errorf("while it hibernates: %+v, %v, replayed %v", s, err, replayed)
		}
		if _, err := m.Kill(t.Context(), key("a")); err != nil {
			t.Fatal(err)
		}
		if s, replayed, err := m.Claim(t.Context(), r); err != nil || !replayed || s.ID != first.ID || s.State != sandbox.Ended || s.Reason != sandbox.ReasonKilled {
			t.Errorf("after it was killed: %+v, %v, replayed %v", s, err, replayed)
		}
	})
}
