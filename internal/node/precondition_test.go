package node

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// verbs are all that are done to a sandbox under its name.
var verbs = map[string]func(context.Context, *Manager, sandbox.Key, sandbox.Precondition) error{
	"pause": func(ctx context.Context, m *Manager, k sandbox.Key, p sandbox.Precondition) error {
		return second(m.Pause(ctx, k, p))
	},
	"resume": func(ctx context.Context, m *Manager, k sandbox.Key, p sandbox.Precondition) error {
		return second(m.Resume(ctx, k, p))
	},
	"hibernate": func(ctx context.Context, m *Manager, k sandbox.Key, p sandbox.Precondition) error {
		return second(m.Hibernate(ctx, k, p))
	},
	"extend": func(ctx context.Context, m *Manager, k sandbox.Key, p sandbox.Precondition) error {
		return second(m.Extend(ctx, k, time.Hour, p))
	},
	"end time": func(ctx context.Context, m *Manager, k sandbox.Key, p sandbox.Precondition) error {
		return second(m.SetExpiry(ctx, k, time.Now().Add(time.Hour), p))
	},
	"token": func(ctx context.Context, m *Manager, k sandbox.Key, p sandbox.Precondition) error {
		return second(m.SetToken(ctx, k, sandbox.HashToken(string(k.Name)), p))
	},
	"policy": func(ctx context.Context, m *Manager, k sandbox.Key, p sandbox.Precondition) error {
		return second(m.SetNetworkPolicy(ctx, k, nil, p))
	},
	"kill": func(ctx context.Context, m *Manager, k sandbox.Key, p sandbox.Precondition) error {
		return second(m.Kill(ctx, k, p))
	},
}

// copies are the operations that copy a sandbox.
var copies = map[string]func(context.Context, *Manager, sandbox.Key, sandbox.Precondition) error{
	"fork": func(ctx context.Context, m *Manager, k sandbox.Key, p sandbox.Precondition) error {
		return third(m.Fork(ctx, sandbox.ForkRequest{Key: key("f-of-" + string(k.Name)), Spec: sandbox.ForkSpec{Source: k.Name, Replicas: 1}, When: p}))
	},
	"checkpoint": func(ctx context.Context, m *Manager, k sandbox.Key, p sandbox.Precondition) error {
		return third(m.Checkpoint(ctx, sandbox.CheckpointRequest{Key: key("c-of-" + string(k.Name)), Source: k.Name, When: p}))
	},
}

// TestPreconditions: a call that is for another sandbox than the one under the name does
// nothing, and one that is for this one is done.
func TestPreconditions(t *testing.T) {
	for _, all := range []map[string]func(context.Context, *Manager, sandbox.Key, sandbox.Precondition) error{verbs, copies} {
		for name, do := range all {
			t.Run(name, func(t *testing.T) {
				onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
					first := claimFor(t, m, ownedClaim())
					if _, err := m.Kill(owning(t), key("a"), sandbox.Precondition{ID: first.ID, Owner: uid, Version: first.ResourceVersion}); err != nil {
						t.Fatal(err)
					}
					second := claimFor(t, m, ownedClaim(func(r *sandbox.ClaimRequest) { r.Owner = "second" }))
					for what, try := range map[string]struct {
						p    sandbox.Precondition
						want sandbox.Code
					}{
						"the one before":      {sandbox.Precondition{ID: first.ID}, sandbox.CodeEnded},
						"one that never was":  {sandbox.Precondition{ID: sandbox.NewID()}, sandbox.CodeConflict},
						"the owner before":    {sandbox.Precondition{Owner: uid}, sandbox.CodeConflict},
						"the version before":  {sandbox.Precondition{Version: first.ResourceVersion}, sandbox.CodeConflict},
						"a version to come":   {sandbox.Precondition{Version: 1 << 60}, sandbox.CodeConflict},
						"this id, that owner": {sandbox.Precondition{ID: second.ID, Owner: uid}, sandbox.CodeConflict},
						"this id, a version":  {sandbox.Precondition{ID: second.ID, Version: second.ResourceVersion - 1}, sandbox.CodeConflict},
					} {
						if err := do(owning(t), m, key("a"), try.p); !sandbox.HasCode(err, try.want) {
							t.Errorf("%s: %v, want %s", what, err, try.want)
						}
					}
					if s := wantState(t, m, "a", sandbox.Running); s.ResourceVersion != second.ResourceVersion || s.ID != second.ID {
						t.Errorf("%+v was changed", s)
					}
					if len(h.Folders()) != 1 {
						t.Errorf("%d machines", len(h.Folders()))
					}
					if err := do(owning(t), m, key("a"), sandbox.Precondition{ID: second.ID, Owner: "second", Version: second.ResourceVersion}); err != nil {
						t.Errorf("meant: %v", err)
					}
				})
			})
		}
	}
}

// TestKillNeverHitsASuccessor: kills of a sandbox that are tried again and again leave those
// alone that have its name later.
func TestKillNeverHitsASuccessor(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		first := claim(t, m, "a", sandbox.Lifetime{})
		ctx, cancel := context.WithCancel(context.Background())
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				for ctx.Err() == nil {
					_, _ = m.Kill(ctx, key("a"), sandbox.Precondition{ID: first.ID})
					time.Sleep(time.Millisecond)
				}
			})
		}
		time.Sleep(10 * time.Millisecond)
		for range 20 {
			next := claim(t, m, "a", sandbox.Lifetime{})
			time.Sleep(5 * time.Millisecond)
			if _, err := m.Kill(t.Context(), key("a"), sandbox.Precondition{ID: next.ID}); err != nil {
				t.Errorf("it was ended by somebody else: %v", err)
			}
		}
		cancel()
		all.Wait()
	})
}

// TestKillOfAVersionWaits: a kill with a resource version interrupts nothing: it ends the sandbox
// as its caller has seen it, or does nothing.
func TestKillOfAVersionWaits(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		s := claim(t, m, "a", sandbox.Lifetime{})
		b, err := m.find(key("a"))
		if err != nil {
			t.Fatal(err)
		}
		if err := b.lock(t.Context()); err != nil {
			t.Fatal(err)
		}
		busy, done := b.untilKilled(t.Context())
		killed := make(chan error, 1)
		go func() {
			killed <- second(m.Kill(t.Context(), key("a"), sandbox.Precondition{Version: s.ResourceVersion}))
		}()
		synctest.Wait()
		if busy.Err() != nil || b.wasKilled() {
			t.Error("what was being done is cancelled")
		}
		if err := b.change(func(s *sandbox.Sandbox) { s.Timeout = time.Hour }); err != nil {
			t.Fatal(err)
		}
		done()
		b.unlock()
		if err := <-killed; !sandbox.HasCode(err, sandbox.CodeConflict) {
			t.Errorf("%v", err)
		}
		now := wantState(t, m, "a", sandbox.Running)
		if _, err := m.Kill(t.Context(), key("a"), sandbox.Precondition{Version: now.ResourceVersion}); err != nil {
			t.Error(err)
		}
	})
}

// TestDeletePreconditions: of templates, pools, forks and checkpoints only the one that is meant
// is deleted.
func TestDeletePreconditions(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		c := checkpoint(t, m, "c", "a")
		must(t, third(m.Fork(t.Context(), sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}})))
		f, err := m.ForkOf(t.Context(), key("f"))
		must(t, err)
		time.Sleep(2 * statusEvery)
		p, _, err := m.Pool(t.Context(), key("pool"))
		if err != nil {
			t.Fatal(err)
		}
		for name, try := range map[string]struct {
			del   func(context.Context, sandbox.Key, ...sandbox.Precondition) error
			k     sandbox.Key
			other []sandbox.Precondition
			this  sandbox.Precondition
		}{
			"a checkpoint": {
				m.DeleteCheckpoint, key("c"),
				[]sandbox.Precondition{{ID: sandbox.NewID()}, {ID: c.ID, Version: 1}, {Owner: uid}},
				sandbox.Precondition{ID: c.ID, Version: c.ResourceVersion},
			},
			"a fork": {m.DeleteFork, key("f"), []sandbox.Precondition{{ID: f.SourceID}, {Version: 1}}, sandbox.Precondition{Version: f.ResourceVersion}},
			"a pool": {m.DeletePool, key("pool"), []sandbox.Precondition{{Owner: uid}, {Version: 1}}, sandbox.Precondition{Version: p.ResourceVersion}},
		} {
			for _, p := range try.other {
				if err := try.del(t.Context(), try.k, p); !sandbox.HasCode(err, sandbox.CodeConflict) {
					t.Errorf("%s, %+v: %v", name, p, err)
				}
			}
			if err := try.del(t.Context(), try.k, try.this); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		tmpl, err := m.Template(t.Context(), key("python"))
		if err != nil {
			t.Fatal(err)
		}
		if err := m.DeleteTemplate(t.Context(), key("python"), sandbox.Precondition{Version: tmpl.ResourceVersion - 1}); !sandbox.HasCode(err, sandbox.CodeConflict) {
			t.Errorf("a template: %v", err)
		}
		if err := m.DeleteTemplate(t.Context(), key("python"), sandbox.Precondition{Version: tmpl.ResourceVersion}); err != nil {
			t.Errorf("a template: %v", err)
		}
	})
}

// TestOwnedObjects: keys can neither change nor delete an object with an owner, but can use it
// as before. An apply without an owner keeps the owner, and an owner cannot be replaced by
// another.
func TestOwnedObjects(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		spec, keeps := sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib}, sandbox.PoolSpec{Template: "python"}
		key1 := t.Context()
		denied := func(what string, err error) {
			t.Helper()
			if !sandbox.HasCode(err, sandbox.CodeDenied) {
				t.Errorf("%s: %v", what, err)
			}
		}
		denied("a key gives an owner", second(m.ApplyTemplate(key1, key("x"), spec, uid)))
		denied("a key gives an owner", second(m.ApplyPool(key1, key("pool"), keeps, uid)))
		if tm, err := m.ApplyTemplate(owning(t), key("python"), spec, uid); err != nil || tm.Owner != uid {
			t.Fatalf("%+v, %v", tm, err)
		}
		if p, err := m.ApplyPool(owning(t), key("pool"), keeps, uid); err != nil || p.Owner != uid {
			t.Fatalf("%+v, %v", p, err)
		}
		synctest.Wait()
		denied("a template is applied", second(m.ApplyTemplate(key1, key("python"), spec)))
		denied("a pool is applied", second(m.ApplyPool(key1, key("pool"), keeps)))
		denied("a template is deleted", m.DeleteTemplate(key1, key("python")))
		denied("a pool is deleted", m.DeletePool(key1, key("pool")))
		claimFor(t, m, ownedClaim())
		for name, do := range verbs {
			denied(name, do(key1, m, key("a"), sandbox.Precondition{}))
		}
		for name, do := range copies {
			if err := do(key1, m, key("a"), sandbox.Precondition{}); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		u, err := m.Use(key1, key("a"))
		if err != nil {
			t.Fatal(err)
		}
		u.Close()
		claim(t, m, "of-the-pool", sandbox.Lifetime{}) // by a key
		wantState(t, m, "a", sandbox.Running)
		if tm, err := m.ApplyTemplate(owning(t), key("python"), spec); err != nil || tm.Owner != uid {
			t.Errorf("%+v, %v", tm, err)
		}
		if _, err := m.ApplyPool(owning(t), key("pool"), keeps, "another"); !sandbox.HasCode(err, sandbox.CodeConflict) {
			t.Errorf("another owner: %v", err)
		}
		if p, _, err := m.Pool(t.Context(), key("pool")); err != nil || p.Owner != uid {
			t.Errorf("%+v, %v", p, err)
		}
		if err := m.DeletePool(owning(t), key("pool"), sandbox.Precondition{Owner: "another"}); !sandbox.HasCode(err, sandbox.CodeConflict) {
			t.Errorf("deleted for another: %v", err)
		}
		if err := m.DeletePool(owning(t), key("pool"), sandbox.Precondition{Owner: uid}); err != nil {
			t.Error(err)
		}
		if err := m.DeleteTemplate(owning(t), key("python"), sandbox.Precondition{Owner: uid}); err != nil {
			t.Error(err)
		}
		if _, err := m.Cordon(t.Context(), true); err != nil { // of the node, not of somebody
			t.Fatal(err)
		}
		synctest.Wait()
		wantState(t, m, "a", sandbox.Hibernated)
	})
}
