package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

const uid sandbox.UID = "3f0c8a4e-0000-4000-8000-00000000000A"

// owning is the context of a controller.
func owning(t *testing.T) context.Context { return sandbox.WithOwning(t.Context()) }

// ownedClaim is a claim of an owner for the sandbox a.
func ownedClaim(change ...func(*sandbox.ClaimRequest)) sandbox.ClaimRequest {
	r := sandbox.ClaimRequest{Key: key("a"), Owner: uid, Spec: sandbox.ClaimSpec{Pool: "pool"}}
	for _, c := range change {
		c(&r)
	}
	return r
}

// wantOwned claims, and requires the sandbox of an owner as it is.
func wantOwned(t *testing.T, m *Manager, r sandbox.ClaimRequest, id sandbox.ID, state sandbox.State) sandbox.Sandbox {
	t.Helper()
	s, replayed, err := m.Claim(owning(t), r)
	if err != nil || !replayed || s.ID != id || s.State != state || s.Owner != r.Owner || s.Key != r.Key || s.ResourceVersion == 0 {
		t.Errorf("%+v, replayed %t, %v; want %s of %s", s, replayed, err, state, id)
	}
	return s
}

func claimFor(t *testing.T, m *Manager, r sandbox.ClaimRequest) sandbox.Sandbox {
	t.Helper()
	s, replayed, err := m.Claim(owning(t), r)
	if err != nil || replayed || s.Owner != r.Owner || s.State != sandbox.Running {
		t.Fatalf("%+v, replayed %t, %v", s, replayed, err)
	}
	return s
}

// TestOwner: a repeated claim of an owner returns the existing sandbox, unchanged, for any
// principal, token and secrets, after restarts and after any time. A sandbox that has ended
// is Ended.
func TestOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 1)
		full := func(r *sandbox.ClaimRequest) {
			r.Token, r.Values = sandbox.HashToken("ars_one"), sandbox.SecretData{"KEY": []byte("one")}
			r.Spec.Env, r.Spec.Metadata = sandbox.Env{"A": "b"}, map[string]string{"k": "v"}
			r.Spec.OnTimeout, r.Spec.Timeout = sandbox.TimeoutKill, 300*time.Hour
		}
		made := claimFor(t, m, ownedClaim(full))
		again := ownedClaim(full, func(r *sandbox.ClaimRequest) {
			r.Token, r.Values, r.Spec.OnTimeout = sandbox.HashToken("ars_two"), sandbox.SecretData{"OTHER": []byte("x")}, ""
			r.Spec.Secrets = []sandbox.SecretRef{{Secret: "s", Key: "k"}}
		})
		wantOwned(t, m, again, made.ID, sandbox.Running)
		if _, err := m.Hibernate(owning(t), key("a")); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * keepAnswers)
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		m = daemon(t, dir, h)
		synctest.Wait()
		if s, _, err := m.Claim(sandbox.WithPrincipal(owning(t), "another"), again); err != nil || s.ID != made.ID || s.State != sandbox.Hibernated {
			t.Errorf("two days later: %+v, %v", s, err)
		}
		if err := m.ReleaseOwner(owning(t), sandbox.ReleaseRequest{Namespace: sandbox.DefaultNamespace, Owner: uid}); !sandbox.HasCode(err, sandbox.CodeConflict) {
			t.Errorf("released alive: %v", err)
		}
		if _, err := m.Kill(owning(t), key("a")); err != nil {
			t.Fatal(err)
		}
		if s := wantOwned(t, m, again, made.ID, sandbox.Ended); s.Reason != sandbox.ReasonKilled || s.Ended.IsZero() {
			t.Errorf("%+v", s)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		m = daemon(t, dir, h)
		wantOwned(t, m, again, made.ID, sandbox.Ended)
		other := ownedClaim()
		other.Namespace = "another"
		if _, _, err := m.Claim(owning(t), other); !sandbox.HasCode(err, sandbox.CodeNotFound) { // it has no pool
			t.Errorf("the owner of another namespace: %v", err)
		}
		if err := m.ReleaseOwner(owning(t), sandbox.ReleaseRequest{Namespace: "another", Owner: uid}); !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Errorf("released from another namespace: %v", err)
		}
		if err := m.ReleaseOwner(owning(t), sandbox.ReleaseRequest{Namespace: sandbox.DefaultNamespace, Owner: uid}); err != nil {
			t.Error(err)
		}
		if err := m.ReleaseOwner(owning(t), sandbox.ReleaseRequest{Namespace: sandbox.DefaultNamespace, Owner: uid}); !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Errorf("released twice: %v", err)
		}
		if s := claimFor(t, m, ownedClaim()); s.ID == made.ID {
			t.Error("the owner was not released")
		}
		wantOwners(t, m, 1, 0)
	})
}

// wantOwners counts the owners in the journal, and those that have ended.
func wantOwners(t *testing.T, m *Manager, all, past int) {
	t.Helper()
	err := m.db.View(func(tx *journal.Tx) error {
		gotAll, gotPast := 0, 0
		err := errors.Join(
			owners.Keys(tx, "", func(string, uint64) error { gotAll++; return nil }),
			ownersByEnd.Keys(tx, "", func(string, uint64) error { gotPast++; return nil }))
		count, _, countErr := ownersEnded.Get(tx, string(sandbox.DefaultNamespace))
		if gotAll != all || gotPast != past || count != past {
			t.Errorf("%d owners, %d of them past and counted as %d; want %d and %d", gotAll, gotPast, count, all, past)
		}
		return errors.Join(err, countErr)
	})
	if err != nil {
		t.Error(err)
	}
}

// TestOwnerAsksOtherwise: a claim that differs is a conflict that names the fields.
func TestOwnerAsksOtherwise(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		base := func(r *sandbox.ClaimRequest) {
			r.Spec.Env, r.Spec.Timeout = sandbox.Env{"A": "1"}, time.Hour
			r.Spec.Expires = time.Now().Add(2 * time.Hour)
		}
		made := claimFor(t, m, ownedClaim(base))
		for fields, change := range map[string]func(*sandbox.ClaimRequest){
			"name":                               func(r *sandbox.ClaimRequest) { r.Name = "b" },
			"pool":                               func(r *sandbox.ClaimRequest) { r.Spec.Pool = "other" },
			"env":                                func(r *sandbox.ClaimRequest) { r.Spec.Env = nil },
			"metadata":                           func(r *sandbox.ClaimRequest) { r.Spec.Metadata = map[string]string{"a": "b"} },
			"lifetime.expires, lifetime.timeout": func(r *sandbox.ClaimRequest) { r.Spec.Lifetime = sandbox.Lifetime{} },
			"env, lifetime.idle_timeout, lifetime.on_timeout": func(r *sandbox.ClaimRequest) {
				r.Spec.Env, r.Spec.IdleTimeout, r.Spec.OnTimeout = sandbox.Env{"A": "secret-2"}, 1, sandbox.TimeoutPause
			},
		} {
			_, _, err := m.Claim(owning(t), ownedClaim(base, change))
			if !sandbox.HasCode(err, sandbox.CodeConflict) || !strings.Contains(err.Error(), "differ: "+fields+".") || strings.Contains(err.Error(), "secret-2") {
				t.Errorf("%s: %v", fields, err)
			}
		}
		wantOwned(t, m, ownedClaim(base), made.ID, sandbox.Running)
	})
}

// TestOwnerAtOnce: claims of one owner that come together make one sandbox, and one that fails
// leaves it to the next; one that is cancelled waits no longer.
func TestOwnerAtOnce(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		h.FailNext(errors.New("no luck"))
		var mu sync.Mutex
		ids, failed := map[sandbox.ID]int{}, 0
		var all sync.WaitGroup
		for range 16 {
			all.Go(func() {
				s, _, err := m.Claim(owning(t), ownedClaim())
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
		done, err := m.ownerTurns.take(t.Context(), ownerKey(sandbox.DefaultNamespace, uid))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(owning(t), time.Second)
		defer cancel()
		if _, _, err := m.Claim(ctx, ownedClaim()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		done()
		wantOwners(t, m, 1, 0)
	})
}

// TestOwnerRaces: whatever is done with an owner's sandbox at once, there is never a second one.
func TestOwnerRaces(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		for round := range 20 {
			owner := sandbox.UID(fmt.Sprintf("round-%d", round))
			r := ownedClaim(func(r *sandbox.ClaimRequest) { r.Owner, r.Name = owner, sandbox.Name(owner) })
			var mu sync.Mutex
			ids := map[sandbox.ID]bool{}
			var all sync.WaitGroup
			for range 4 {
				all.Go(func() {
					if s, _, err := m.Claim(owning(t), r); err == nil {
						mu.Lock()
						ids[s.ID] = true
						mu.Unlock()
					}
				})
				all.Go(func() { _, _ = m.Kill(owning(t), r.Key) })
				all.Go(func() { _, _ = m.Hibernate(owning(t), r.Key) })
			}
			all.Wait()
			if len(ids) != 1 {
				t.Errorf("%d sandboxes of %s", len(ids), owner)
			}
		}
	})
}

// TestOwnerEnds: whatever has ended the sandbox, its owner's claim says why, also when the
// history has forgotten it; and 7 days later it is forgotten.
func TestOwnerEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		made := claimFor(t, m, ownedClaim(func(r *sandbox.ClaimRequest) { r.Spec.Timeout = time.Minute }))
		timed := ownedClaim(func(r *sandbox.ClaimRequest) { r.Spec.Timeout = time.Minute })
		lost := ownedClaim(func(r *sandbox.ClaimRequest) { r.Name, r.Owner = "lost", "lost" })
		gone := claimFor(t, m, lost)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if s := wantOwned(t, m, timed, made.ID, sandbox.Ended); s.Reason != sandbox.ReasonTimeout {
			t.Errorf("%+v", s)
		}
		for i := range historyRecords {
			m.writeEnd(t, sandbox.DefaultNamespace, fmt.Sprintf("x-%d", i), time.Now(), "")
		}
		if _, found, err := m.endedAs(key("a"), made.ID); found || err != nil {
			t.Fatalf("the history has it still: %v", err)
		}
		if s := wantOwned(t, m, timed, made.ID, sandbox.Ended); s.Reason != sandbox.ReasonTimeout || s.Pool != "pool" || s.Created.IsZero() {
			t.Errorf("%+v", s)
		}
		m.crash()
		m = daemon(t, dir, h, func(c *Config) { c.Boot = "next" })
		if s := wantOwned(t, m, lost, gone.ID, sandbox.Ended); s.Reason != sandbox.ReasonHostRestart {
			t.Errorf("%+v", s)
		}
		wantOwners(t, m, 2, 2)
		time.Sleep(keepOwners)
		if s := claimFor(t, m, lost); s.ID == gone.ID {
			t.Errorf("%+v", s)
		}
		if _, err := m.Kill(owning(t), lost.Key); err != nil {
			t.Fatal(err)
		}
		wantOwners(t, m, 1, 1) // the one whose time was up is forgotten
	})
}

// TestOwnersAreBounded: a namespace has so many owners that have ended; they are never
// forgotten for a new one.
func TestOwnersAreBounded(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		if err := m.db.Update(func(tx *journal.Tx) error {
			return ownersEnded.Put(tx, string(sandbox.DefaultNamespace), maxOwnersEnded)
		}); err != nil {
			t.Fatal(err)
		}
		if _, _, err := m.Claim(owning(t), ownedClaim()); !sandbox.HasCode(err, sandbox.CodeCapacity) || !strings.Contains(err.Error(), "Release") {
			t.Errorf("%v", err)
		}
	})
}

// TestOwnerHostile: principals that may not give an owner, and owners that no
// claim can have.
func TestOwnerHostile(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		claimFor(t, m, ownedClaim())
		for name, try := range map[string]struct {
			ctx  context.Context
			r    sandbox.ClaimRequest
			want sandbox.Code
		}{
			"a key asks for the owner's sandbox": {t.Context(), ownedClaim(), sandbox.CodeDenied},
			"an owner and an idempotency key": {owning(t), ownedClaim(func(r *sandbox.ClaimRequest) {
				r.Once = new(sandbox.NewOnce("me", "claim", "k", nil))
			}), sandbox.CodeInvalid},
			"a variable that is none": {owning(t), ownedClaim(func(r *sandbox.ClaimRequest) {
				r.Owner, r.Name, r.Values = "b", "b", sandbox.SecretData{"A.B": []byte("x")}
			}), sandbox.CodeInvalid},
			"a variable twice": {owning(t), ownedClaim(func(r *sandbox.ClaimRequest) {
				r.Owner, r.Name, r.Values, r.Spec.Env = "b", "b", sandbox.SecretData{"A": []byte("x")}, sandbox.Env{"A": "y"}
			}), sandbox.CodeInvalid},
			"a value that is too large": {owning(t), ownedClaim(func(r *sandbox.ClaimRequest) {
				r.Owner, r.Name, r.Values = "b", "b", sandbox.SecretData{"A": make([]byte, sandbox.MaxSecretValue+1)}
			}), sandbox.CodeInvalid},
			"a value with a NUL": {owning(t), ownedClaim(func(r *sandbox.ClaimRequest) {
				r.Owner, r.Name, r.Values = "b", "b", sandbox.SecretData{"A": {0}}
			}), sandbox.CodeInvalid},
			"a name of another": {owning(t), ownedClaim(func(r *sandbox.ClaimRequest) { r.Owner = "b" }), sandbox.CodeExists},
		} {
			if _, _, err := m.Claim(try.ctx, try.r); !sandbox.HasCode(err, try.want) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := m.ReleaseOwner(t.Context(), sandbox.ReleaseRequest{Namespace: sandbox.DefaultNamespace, Owner: uid}); !sandbox.HasCode(err, sandbox.CodeDenied) {
			t.Errorf("a key releases: %v", err)
		}
		if len(h.Folders()) != 1 {
			t.Errorf("%d machines", len(h.Folders()))
		}
		wantOwners(t, m, 1, 0)
	})
}

// TestOwnerKilled: wherever the daemon is killed during the life of an owner's sandbox, at each
// commit and each step of a machine, the owner has one sandbox: the one that somebody was told
// of, if somebody was, in the state that he was told of or the one after it.
func TestOwnerKilled(t *testing.T) {
	type picture struct {
		accident
		told   sandbox.ID
		states []sandbox.State // that the claim may be answered with; nil is a new one, too
	}
	var all []picture
	pictures := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		var told sandbox.ID
		var states []sandbox.State
		doing := ""
		var mu sync.Mutex
		take := func() {
			mu.Lock()
			defer mu.Unlock()
			p := picture{accident{doing: doing, dir: filepath.Join(pictures, fmt.Sprint(len(all))), processes: map[string]map[string]string{}}, told, states}
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
		time.Sleep(2 * statusEvery) // no further write comes from the background
		synctest.Wait()
		h.Step = take
		m.db.ObserveCommits(func(c journal.Commit) {
			m.changes.note(c)
			m.tally.note(c)
			take()
		})
		for _, step := range []struct {
			name   string
			states []sandbox.State
			do     func() error
		}{
			{"claim", nil, func() error { s, _, err := m.Claim(owning(t), ownedClaim()); told = s.ID; return err }},
			{"set a token", []sandbox.State{sandbox.Running}, func() error {
				_, err := m.SetToken(owning(t), key("a"), sandbox.HashToken("ars_x"))
				return err
			}},
			{"hibernate", []sandbox.State{sandbox.Running, sandbox.Hibernated}, func() error { _, err := m.Hibernate(owning(t), key("a")); return err }},
			{"kill", []sandbox.State{sandbox.Hibernated, sandbox.Ended}, func() error { _, err := m.Kill(owning(t), key("a")); return err }},
			{"release", []sandbox.State{sandbox.Ended, sandbox.Running}, func() error {
				return m.ReleaseOwner(owning(t), sandbox.ReleaseRequest{Namespace: sandbox.DefaultNamespace, Owner: uid})
			}},
		} {
			mu.Lock()
			doing, states = step.name, step.states
			mu.Unlock()
			if err := step.do(); err != nil {
				t.Fatalf("%s: %v", doing, err)
			}
			synctest.Wait()
		}
		h.Step = nil
	})
	if len(all) < 12 {
		t.Errorf("only %d pictures", len(all))
	}
	for i, p := range all {
		t.Run(fmt.Sprintf("%d-%s", i, p.doing), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := nodetest.NewHost(t)
				for rel, memory := range p.processes {
					h.Put(filepath.Join(p.dir, rel), memory)
				}
				m := daemon(t, p.dir, h)
				defer func() { _ = m.Close() }()
				synctest.Wait()
				s, replayed, err := m.Claim(owning(t), ownedClaim())
				if err != nil {
					t.Fatal(err)
				}
				if p.states != nil && !slices.Contains(p.states, s.State) {
					t.Errorf("it is %s, not one of %v", s.State, p.states)
				}
				if released := p.doing == "release" && !replayed; p.told != "" && s.ID != p.told && !released {
					t.Errorf("it is %s, and %s was told of", s.ID, p.told)
				}
				wantOwned(t, m, ownedClaim(), s.ID, s.State)
				list, err := m.Sandboxes(t.Context(), sandbox.SandboxesRequest{Namespace: sandbox.DefaultNamespace})
				if err != nil || len(list) > 1 || len(h.Folders()) > len(list) {
					t.Errorf("%d sandboxes, %d machines, %v", len(list), len(h.Folders()), err)
				}
			})
		})
	}
}

// TestReleaseWhileItIsClaimed: an owner whose claim is under way is not told to be free.
func TestReleaseWhileItIsClaimed(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		var releases []func()
		for range m.cfg.Starts { // no machine is started any more
			release, err := m.turns.take(t.Context(), sandbox.DefaultNamespace)
			must(t, err)
			releases = append(releases, release)
		}
		claimed := make(chan error, 1)
		go func() { claimed <- third(m.Claim(owning(t), ownedClaim())) }()
		synctest.Wait()
		released := make(chan error, 1)
		go func() {
			released <- m.ReleaseOwner(owning(t), sandbox.ReleaseRequest{Namespace: sandbox.DefaultNamespace, Owner: uid})
		}()
		synctest.Wait()
		for _, r := range releases {
			r()
		}
		must(t, <-claimed)
		if err := <-released; !sandbox.HasCode(err, sandbox.CodeConflict) {
			t.Errorf("released: %v", err)
		}
	})
}

// TestOwnersThatAreOverMakeRoom: owners that are not known any more do not keep new ones out.
func TestOwnersThatAreOverMakeRoom(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		claimFor(t, m, ownedClaim())
		must(t, second(m.Kill(owning(t), key("a"))))
		must(t, m.db.Update(func(tx *journal.Tx) error {
			return ownersEnded.Put(tx, string(sandbox.DefaultNamespace), maxOwnersEnded)
		}))
		next := ownedClaim(func(r *sandbox.ClaimRequest) { r.Owner = "next" })
		if _, _, err := m.Claim(owning(t), next); !sandbox.HasCode(err, sandbox.CodeCapacity) {
			t.Errorf("%v", err)
		}
		time.Sleep(keepOwners + time.Second)
		claimFor(t, m, next)
	})
}

// TestOwnersAreForgotten: also where no sandbox of an owner ends any more.
func TestOwnersAreForgotten(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		for i := range ownersStep + 2 {
			r := ownedClaim(func(r *sandbox.ClaimRequest) { r.Owner = sandbox.UID(fmt.Sprintf("o-%d", i)) })
			claimFor(t, m, r)
			must(t, second(m.Kill(owning(t), r.Key)))
		}
		wantOwners(t, m, ownersStep+2, ownersStep+2)
		time.Sleep(keepOwners + forksEvery)
		synctest.Wait()
		wantOwners(t, m, 0, 0)
	})
}
