package node

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// many is a fork of a into three children with names, owners and tokens.
func many(change ...func(*sandbox.ForkSpec)) sandbox.ForkRequest {
	spec := sandbox.ForkSpec{Source: "a", Replicas: 3}
	for _, n := range []string{"x", "y", "z"} {
		spec.Children = append(spec.Children, sandbox.ForkChild{Name: sandbox.Name(n), Owner: sandbox.UID("of-" + n), Token: sandbox.HashToken("ars_" + n)})
	}
	for _, c := range change {
		c(&spec)
	}
	return sandbox.ForkRequest{Key: key("f"), Spec: spec}
}

func atomically(s *sandbox.ForkSpec) { s.Atomic = true }

// TestForkOfMany: each child has its name, its owner and its token; a fork that comes again has
// the fork that there is, and the claim of a child's owner never makes another sandbox.
func TestForkOfMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		claim(t, m, "a", sandbox.Lifetime{})
		f, replayed, err := m.Fork(owning(t), many(atomically))
		if err != nil || replayed || f.Phase != sandbox.PhaseReady {
			t.Fatalf("%+v, %t, %v", f, replayed, err)
		}
		must(t, m.Close())
		m = daemon(t, dir, h)
		synctest.Wait()
		for i, n := range []string{"x", "y", "z"} {
			s := wantState(t, m, n, sandbox.Running)
			if c := f.Children[i]; s.ID != c.ID || s.Owner != sandbox.UID("of-"+n) || c.Owner != s.Owner || s.Fork != "f" {
				t.Errorf("%+v of %+v", s, c)
			}
			wantToken(t, m, hashed("ars_"+n), s.ID)
			_, _, err := m.Claim(owning(t), ownedClaim(func(r *sandbox.ClaimRequest) { r.Owner, r.Name = s.Owner, "other" }))
			if !sandbox.HasCode(err, sandbox.CodeConflict) {
				t.Errorf("a claim of a child's owner: %v", err)
			}
		}
		again, replayed, err := m.Fork(owning(t), many(atomically, func(s *sandbox.ForkSpec) { s.Children[0].Token = "" }))
		if err != nil || !replayed || again.Children[2].ID != f.Children[2].ID || again.ResourceVersion == 0 {
			t.Errorf("%+v, %t, %v", again, replayed, err)
		}
		for fields, change := range map[string]func(*sandbox.ForkSpec){
			"children": func(s *sandbox.ForkSpec) { s.Children[0].Owner = "another" },
			"source":   func(s *sandbox.ForkSpec) { s.Source = "x" },
			"atomic":   func(s *sandbox.ForkSpec) { s.Atomic = false },
		} {
			if _, _, err := m.Fork(owning(t), many(atomically, change)); !sandbox.HasCode(err, sandbox.CodeConflict) || !strings.Contains(err.Error(), "differ: "+fields) {
				t.Errorf("%s: %v", fields, err)
			}
		}
		if err := m.DeleteFork(t.Context(), key("f")); !sandbox.HasCode(err, sandbox.CodeDenied) {
			t.Errorf("a key ends the children: %v", err)
		}
		must(t, m.DeleteFork(owning(t), key("f")))
		if _, _, err := m.Fork(owning(t), many(atomically)); !sandbox.HasCode(err, sandbox.CodeConflict) || !strings.Contains(err.Error(), "of-x") {
			t.Errorf("forked again: %v", err)
		}
		wantOwners(t, m, 3, 3)
		for _, n := range []string{"x", "y", "z"} {
			must(t, m.ReleaseOwner(owning(t), sandbox.ReleaseRequest{Namespace: sandbox.DefaultNamespace, Owner: sandbox.UID("of-" + n)}))
		}
		must(t, third(m.Fork(owning(t), many())))
	})
}

// TestForkOfManyInTheMaking: a key does not cut off what a controller forks.
func TestForkOfManyInTheMaking(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		looked := 0
		h.Step = func() {
			looked++
			if err := m.DeleteFork(t.Context(), key("f")); !sandbox.HasCode(err, sandbox.CodeDenied) {
				t.Errorf("%v", err)
			}
		}
		if f, _, err := m.Fork(owning(t), many()); err != nil || f.Phase != sandbox.PhaseReady || looked == 0 {
			t.Errorf("%+v, %v, looked %d times", f, err, looked)
		}
		h.Step = nil
	})
}

// TestForkAtomic: if one child fails at any step, an atomic fork makes no children, and any
// other fork makes the rest.
func TestForkAtomic(t *testing.T) {
	for name, trouble := range map[string]struct {
		prepare func(*testing.T, *Manager, *nodetest.Host)
		code    sandbox.Code
	}{
		"a name that is taken": {func(t *testing.T, m *Manager, _ *nodetest.Host) { claim(t, m, "y", sandbox.Lifetime{}) }, sandbox.CodeExists},
		"an owner that has one": {func(t *testing.T, m *Manager, _ *nodetest.Host) {
			claimFor(t, m, ownedClaim(func(r *sandbox.ClaimRequest) { r.Owner, r.Name = "of-y", "other" }))
		}, sandbox.CodeConflict},
		"a token of another": {func(t *testing.T, m *Manager, _ *nodetest.Host) {
			claimFor(t, m, ownedClaim(func(r *sandbox.ClaimRequest) { r.Owner, r.Name, r.Token = "o", "other", sandbox.HashToken("ars_y") }))
		}, sandbox.CodeConflict},
		"a machine that fails": {func(_ *testing.T, _ *Manager, h *nodetest.Host) { h.FailNext(errors.New("no luck")) }, ""},
		"a quota that is reached": {func(t *testing.T, m *Manager, _ *nodetest.Host) {
			must(t, second(m.SetQuota(t.Context(), sandbox.Quota{Namespace: sandbox.DefaultNamespace, Sandboxes: 3})))
		}, sandbox.CodeCapacity},
	} {
		for _, atomic := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, atomic %t", name, atomic), func(t *testing.T) {
				onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
					claim(t, m, "a", sandbox.Lifetime{})
					trouble.prepare(t, m, h)
					machines, reserved := len(h.Folders()), m.capacity.reserved()
					f, _, err := m.Fork(owning(t), many(func(s *sandbox.ForkSpec) { s.Atomic = atomic }))
					if !atomic {
						made := 0
						for _, c := range f.Children {
							if c.ID != "" {
								made++
							}
						}
						if err != nil || made != 2 || f.Phase != sandbox.PhaseFailed {
							t.Errorf("%+v, %v", f, err)
						}
						again, replayed, err := m.Fork(owning(t), many())
						if err != nil || !replayed || len(again.Children) != 3 {
							t.Errorf("%+v, %t, %v", again, replayed, err)
						}
						return
					}
					if err == nil || trouble.code != "" && !sandbox.HasCode(err, trouble.code) {
						t.Errorf("%+v, %v", f, err)
					}
					if len(h.Folders()) != machines || m.capacity.reserved() != reserved {
						t.Errorf("%d machines and %d bytes, not %d and %d", len(h.Folders()), m.capacity.reserved(), machines, reserved)
					}
					if _, err := m.ForkOf(t.Context(), key("f")); !sandbox.HasCode(err, sandbox.CodeNotFound) {
						t.Errorf("the fork is there: %v", err)
					}
					for _, n := range []string{"x", "z"} {
						if _, err := m.Sandbox(t.Context(), key(n)); !sandbox.HasCode(err, sandbox.CodeNotFound) {
							t.Errorf("%s: %v", n, err)
						}
						wantToken(t, m, hashed("ars_"+n), "")
					}
					wantState(t, m, "a", sandbox.Running)
				})
			})
		}
	}
}

// TestForkChildrenThatCannotBe are refused before anything is done.
func TestForkChildrenThatCannotBe(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		for name, change := range map[string]func(*sandbox.ForkSpec){
			"one fewer":             func(s *sandbox.ForkSpec) { s.Children = s.Children[:2] },
			"a name twice":          func(s *sandbox.ForkSpec) { s.Children[0].Name = "y" },
			"the name of a default": func(s *sandbox.ForkSpec) { s.Children[0].Name, s.Children[1].Name = "f-2", "" },
			"an owner twice":        func(s *sandbox.ForkSpec) { s.Children[0].Owner = "of-y" },
			"an owner missing":      func(s *sandbox.ForkSpec) { s.Children[2].Owner = "" },
			"the first missing":     func(s *sandbox.ForkSpec) { s.Children[0].Owner = "" },
			"a token twice":         func(s *sandbox.ForkSpec) { s.Children[0].Token = s.Children[2].Token },
		} {
			if _, _, err := m.Fork(owning(t), many(change)); !sandbox.HasCode(err, sandbox.CodeInvalid) {
				t.Errorf("%s: %v", name, err)
			}
		}
		once := many()
		once.Once = new(sandbox.NewOnce("me", "fork", "k", nil))
		_, _, err := m.Fork(owning(t), once)
		wantInvalid(t, err)
		if _, _, err := m.Fork(t.Context(), many()); !sandbox.HasCode(err, sandbox.CodeDenied) {
			t.Errorf("a key gives owners: %v", err)
		}
		if len(h.Folders()) != 1 {
			t.Errorf("%d machines", len(h.Folders()))
		}
		// One that could neither be made nor forgotten is not answered with.
		asked, err := askedByFork(many())
		must(t, err, m.db.Update(func(tx *journal.Tx) error {
			return forks.Put(tx, key("f").String(), sandbox.Fork{Key: key("f"), Phase: sandbox.PhasePending, Asked: asked})
		}))
		if _, _, err := m.Fork(owning(t), many()); !sandbox.HasCode(err, sandbox.CodeExists) {
			t.Errorf("a fork that is pending: %v", err)
		}
		must(t, m.DeleteFork(owning(t), key("f")))
		// Names and tokens are for everybody.
		f, _, err := m.Fork(t.Context(), many(func(s *sandbox.ForkSpec) {
			for i := range s.Children {
				s.Children[i].Owner = ""
			}
		}))
		if err != nil || f.Children[1].Name != "y" || f.Asked != nil {
			t.Errorf("%+v, %v", f, err)
		}
	})
}

// TestForkOfManyAtOnce: forks and claims of the same owners that come together make one sandbox for
// each of them.
func TestForkOfManyAtOnce(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		var mu sync.Mutex
		ids := map[sandbox.UID]map[sandbox.ID]bool{}
		note := func(owner sandbox.UID, id sandbox.ID) {
			mu.Lock()
			defer mu.Unlock()
			if ids[owner] == nil {
				ids[owner] = map[sandbox.ID]bool{}
			}
			if id != "" {
				ids[owner][id] = true
			}
		}
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				f, _, _ := m.Fork(owning(t), many())
				for _, c := range f.Children {
					note(c.Owner, c.ID)
				}
			})
			for _, n := range []sandbox.Name{"x", "y", "z"} {
				all.Go(func() {
					s, _, _ := m.Claim(owning(t), ownedClaim(func(r *sandbox.ClaimRequest) { r.Owner, r.Name = sandbox.UID("of-"+n), n+"-claimed" }))
					note(sandbox.UID("of-"+n), s.ID)
				})
			}
		}
		all.Wait()
		for owner, got := range ids {
			if len(got) != 1 {
				t.Errorf("%s has %v", owner, got)
			}
		}
		wantOwners(t, m, 3, 0)
	})
}

// TestForkOfManyKilled: wherever the daemon is killed while an atomic fork is made, the next one has
// all children or none, and the fork that comes again has all of them, one of each owner.
func TestForkOfManyKilled(t *testing.T) {
	for name, change := range map[string]func(*sandbox.ForkSpec){
		"live": atomically, "with a checkpoint": func(s *sandbox.ForkSpec) { s.Atomic, s.Checkpoint = true, "c" },
	} {
		t.Run(name, func(t *testing.T) { testForkKilled(t, change) })
	}
}

func testForkKilled(t *testing.T, change func(*sandbox.ForkSpec)) {
	var all []accident
	pictures := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		claim(t, m, "a", sandbox.Lifetime{})
		time.Sleep(2 * statusEvery)
		synctest.Wait()
		var mu sync.Mutex
		take := func() {
			mu.Lock()
			defer mu.Unlock()
			p := accident{doing: "fork", dir: filepath.Join(pictures, fmt.Sprint(len(all))), processes: map[string]map[string]string{}}
			copyState(t, dir, p.dir)
			for _, folder := range h.Folders() {
				rel, err := filepath.Rel(dir, folder)
				if err != nil {
					t.Error(err)
				}
				p.processes[rel] = maps.Clone(h.Memory(folder))
			}
			all = append(all, p)
		}
		h.Step = take
		m.db.ObserveCommits(func(c journal.Commit) {
			m.changes.note(c)
			m.tally.note(c)
			take()
		})
		must(t, third(m.Fork(owning(t), many(change))))
		synctest.Wait()
		h.Step = nil
	})
	if len(all) < 6 {
		t.Errorf("only %d pictures", len(all))
	}
	for i, p := range all {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := nodetest.NewHost(t)
				for rel, memory := range p.processes {
					h.Put(filepath.Join(p.dir, rel), memory)
				}
				m := daemon(t, p.dir, h)
				defer func() { _ = m.Close() }()
				synctest.Wait()
				list, err := m.Sandboxes(t.Context(), sandbox.SandboxesRequest{Namespace: sandbox.DefaultNamespace})
				if err != nil || len(list) != 1 && len(list) != 4 || len(h.Folders()) != len(list) {
					t.Fatalf("%d sandboxes, %d machines, %v", len(list), len(h.Folders()), err)
				}
				f, replayed, err := m.Fork(owning(t), many(change))
				if err != nil || replayed != (len(list) == 4) || len(f.Children) != 3 {
					t.Errorf("%+v, %t, %v", f, replayed, err)
				}
				for _, c := range f.Children {
					if s := wantState(t, m, string(c.Name), sandbox.Running); s.ID != c.ID || s.Owner != c.Owner {
						t.Errorf("%+v of %+v", s, c)
					}
				}
				wantOwners(t, m, 3, 0)
				stored, err := m.Checkpoints(t.Context(), sandbox.DefaultNamespace, sandbox.Page{})
				if err != nil || (len(stored) == 1) != (f.Checkpoint != "") {
					t.Errorf("%d checkpoints, %v", len(stored), err)
				}
				wantFolders(t, m, checkpointsDir, len(stored))
			})
		})
	}
}

// TestForkWithCheckpoint: the checkpoint and the children are of the same instant, whatever the
// source is doing, which goes on with that; and without the children there is no checkpoint.
func TestForkWithCheckpoint(t *testing.T) {
	for _, state := range []sandbox.State{sandbox.Running, sandbox.Paused, sandbox.Hibernated} {
		t.Run(string(state), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir, h := t.TempDir(), nodetest.NewHost(t)
				m := daemon(t, dir, h)
				defer func() { _ = m.Close() }()
				setUp(t, m, 0)
				claim(t, m, "a", sandbox.Lifetime{})
				memory(t, h, m, "a")["mine"] = "then"
				switch state {
				case sandbox.Paused:
					must(t, second(m.Pause(t.Context(), key("a"))))
				case sandbox.Hibernated:
					must(t, second(m.Hibernate(t.Context(), key("a"))))
				}
				with := func(s *sandbox.ForkSpec) { s.Atomic, s.Checkpoint = true, "c" }
				f, _, err := m.Fork(owning(t), many(with))
				if err != nil || f.Phase != sandbox.PhaseReady || f.Checkpoint != "c" {
					t.Fatalf("%+v, %v", f, err)
				}
				wantState(t, m, "a", state)
				must(t, second(m.Resume(t.Context(), key("a"))))
				memory(t, h, m, "a")["mine"] = "now"
				for _, n := range []string{"x", "y", "z"} {
					if got := memory(t, h, m, n); got["mine"] != "then" {
						t.Errorf("%s holds %v", n, got)
					}
					wantToken(t, m, hashed("ars_"+n), wantState(t, m, n, sandbox.Running).ID)
				}
				must(t, m.Close())
				m = daemon(t, dir, h)
				synctest.Wait()
				must(t, third(m.Restore(t.Context(), sandbox.RestoreRequest{Key: key("r"), Checkpoint: "c"})))
				if got := memory(t, h, m, "r"); got["mine"] != "then" {
					t.Errorf("the checkpoint holds %v", got)
				}
				if _, replayed, err := m.Fork(owning(t), many(with)); err != nil || !replayed {
					t.Errorf("%t, %v", replayed, err)
				}
				for _, n := range []string{"a", "x", "y", "z", "r"} {
					must(t, second(m.Kill(owning(t), key(n))))
				}
				must(t, m.DeleteCheckpoint(t.Context(), key("c")))
				wantNothing(t, m, h)
			})
		})
	}
	for name, prepare := range map[string]func(*testing.T, *Manager, *nodetest.Host){
		"a machine that fails":       func(_ *testing.T, _ *Manager, h *nodetest.Host) { h.FailNext(errors.New("no luck")) },
		"a name that is taken":       func(t *testing.T, m *Manager, _ *nodetest.Host) { claim(t, m, "y", sandbox.Lifetime{}) },
		"a checkpoint that is there": func(t *testing.T, m *Manager, _ *nodetest.Host) { checkpoint(t, m, "c", "a") },
	} {
		t.Run(name, func(t *testing.T) {
			onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
				claim(t, m, "a", sandbox.Lifetime{})
				prepare(t, m, h)
				machines, reserved := len(h.Folders()), m.capacity.reserved()
				list, err := m.Checkpoints(t.Context(), sandbox.DefaultNamespace, sandbox.Page{})
				must(t, err)
				stored := len(list)
				if f, _, err := m.Fork(owning(t), many(func(s *sandbox.ForkSpec) { s.Atomic, s.Checkpoint = true, "c" })); err == nil {
					t.Errorf("%+v", f)
				}
				list, err = m.Checkpoints(t.Context(), sandbox.DefaultNamespace, sandbox.Page{})
				must(t, err)
				if len(h.Folders()) != machines || m.capacity.reserved() != reserved || len(list) != stored {
					t.Errorf("%d machines, %d bytes, %d checkpoints", len(h.Folders()), m.capacity.reserved(), len(list))
				}
				wantFolders(t, m, checkpointsDir, stored)
				wantState(t, m, "a", sandbox.Running)
				if _, err := m.ForkOf(t.Context(), key("f")); !sandbox.HasCode(err, sandbox.CodeNotFound) {
					t.Errorf("the fork is there: %v", err)
				}
			})
		})
	}
}

// TestForkOfOwnersIsTheControllers: also when its children have ended, and the controller has
// still to hear of the fork.
func TestForkOfOwnersIsTheControllers(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		made, _, err := m.Fork(owning(t), many())
		must(t, err)
		for _, c := range made.Children {
			must(t, second(m.Kill(owning(t), key(string(c.Name)))))
		}
		if err := m.DeleteFork(t.Context(), key("f")); !sandbox.HasCode(err, sandbox.CodeDenied) {
			t.Errorf("a key forgets it: %v", err)
		}
		if f, replayed, err := m.Fork(owning(t), many()); err != nil || !replayed || f.Children[0].ID != made.Children[0].ID {
			t.Errorf("%+v, %t, %v", f, replayed, err)
		}
		must(t, m.DeleteFork(owning(t), key("f")))
	})
}
