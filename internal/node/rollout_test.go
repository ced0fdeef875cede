package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// neverReady makes sandboxes of the image "bad" that never pass their ready check.
type neverReady struct{ builder }

func (b *neverReady) Finish(_ context.Context, s sandbox.TemplateSpec, _ sandbox.Built, _ engine.Sandbox) error {
	if s.Image == "bad" {
		return errors.New("the ready check fails")
	}
	return nil
}

func applyImage(t *testing.T, m *Manager, image string) sandbox.Template {
	t.Helper()
	tm, err := m.ApplyTemplate(t.Context(), key("python"), sandbox.TemplateSpec{Image: image, MilliCPUs: 1000, Memory: 64 * mib})
	if err != nil {
		t.Fatal(err)
	}
	return tm
}

func applyPool(t *testing.T, m *Manager, spec sandbox.PoolSpec) {
	t.Helper()
	if _, err := m.ApplyPool(t.Context(), key("pool"), spec); err != nil {
		t.Fatal(err)
	}
}

func poolStatus(t *testing.T, m *Manager) sandbox.PoolStatus {
	t.Helper()
	_, st, err := m.Pool(t.Context(), key("pool"))
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// TestRolloutWithoutRoom: a rollout for which there is no memory says so, and holds up
// nothing that comes after it: maxUnavailable makes room for it, and replicas: 0 ends it.
func TestRolloutWithoutRoom(t *testing.T) {
	none, one := 0, 1
	for name, c := range map[string]struct {
		then sandbox.PoolSpec
		want sandbox.PoolStatus
	}{
		"maxUnavailable": {sandbox.PoolSpec{Replicas: 2, MaxSurge: &none, MaxUnavailable: &one}, sandbox.PoolStatus{Phase: sandbox.PhaseReady, Ready: 2, Snapshots: 2}},
		"no replicas":    {sandbox.PoolSpec{}, sandbox.PoolStatus{Phase: sandbox.PhaseReady}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := nodetest.NewHost(t)
				m := daemon(t, t.TempDir(), h, func(c *Config) { c.Capacity = 3 * 64 * mib })
				defer func() { _ = m.Close() }()
				if _, err := m.ApplyTemplate(t.Context(), key("other"), sandbox.TemplateSpec{Image: "two", MilliCPUs: 1000, Memory: 64 * mib}); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				setUp(t, m, 2)
				claim(t, m, "a", sandbox.Lifetime{})
				time.Sleep(time.Minute)
				applyPool(t, m, sandbox.PoolSpec{Template: "other", Replicas: 2})
				time.Sleep(24 * time.Hour)
				if st := poolStatus(t, m); st.Ready != 2 || st.Snapshots != 0 || !strings.Contains(st.Problem, "there is no room") {
					t.Errorf("a day after a change for which there is no room: %+v", st)
				}
				c.then.Template = "other"
				applyPool(t, m, c.then)
				time.Sleep(24 * time.Hour)
				if st := poolStatus(t, m); st != c.want || len(h.Folders()) != c.want.Ready+1 {
					t.Errorf("a day after the next change: %+v, %d machines", st, len(h.Folders()))
				}
			})
		})
	}
}

// TestRolloutNeverReady: an old revision serves claims while sandboxes of the new one never
// become ready; status says why; a fixed one is rolled out.
func TestRolloutNeverReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		m := daemon(t, t.TempDir(), h, func(c *Config) { c.Builder = &neverReady{} })
		defer func() { _ = m.Close() }()
		good := applyImage(t, m, "one")
		applyPool(t, m, sandbox.PoolSpec{Template: "python", Replicas: 2, Stage: sandbox.AfterInit})
		time.Sleep(time.Minute)
		applyImage(t, m, "bad")
		time.Sleep(time.Hour)
		if st := poolStatus(t, m); st.Ready != 2 || st.Snapshots != 0 || !strings.Contains(st.Problem, "the ready check fails") {
			t.Errorf("an hour after a revision that is never ready: %+v", st)
		}
		var claims sync.WaitGroup
		for n := range 20 { // many more than wait
			claims.Go(func() {
				s, _, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key(fmt.Sprintf("a%d", n)), Spec: sandbox.ClaimSpec{Pool: "pool"}})
				if err != nil || s.Revision != good.Revision {
					t.Errorf("claim %d is of revision %q, not of %s, which serves: %v", n, s.Revision, good.Revision, err)
				}
			})
		}
		claims.Wait()
		fixed := applyImage(t, m, "fixed")
		time.Sleep(time.Hour)
		if st := poolStatus(t, m); st != (sandbox.PoolStatus{Phase: sandbox.PhaseReady, Ready: 2, Snapshots: 2}) {
			t.Errorf("an hour after the fix: %+v", st)
		}
		if s := claim(t, m, "b", sandbox.Lifetime{}); s.Revision != fixed.Revision {
			t.Errorf("a claim after the fix is of revision %s, not of %s", s.Revision, fixed.Revision)
		}
	})
}

// Build fails for the image "broken".
func (b *neverReady) Build(ctx context.Context, r BuildRequest) (sandbox.Built, error) {
	if r.Spec.Image == "broken" {
		return sandbox.Built{}, errors.New("the build fails")
	}
	return b.builder.Build(ctx, r)
}

// TestRolloutFollowsSpec: a pool has the size of its spec while the new revision is not
// built, and while it never becomes ready: it grows, and with replicas: 0 it ends its waiting
// sandboxes.
func TestRolloutFollowsSpec(t *testing.T) {
	for _, image := range []string{"broken", "bad"} {
		t.Run(image, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := nodetest.NewHost(t)
				m := daemon(t, t.TempDir(), h, func(c *Config) { c.Builder = &neverReady{} })
				defer func() { _ = m.Close() }()
				applyImage(t, m, "one")
				pool := sandbox.PoolSpec{Template: "python", Replicas: 2, Stage: sandbox.AfterInit}
				applyPool(t, m, pool)
				time.Sleep(time.Minute)
				applyImage(t, m, image)
				time.Sleep(time.Minute)
				for _, pool.Replicas = range []int{4, 1, 0} {
					applyPool(t, m, pool)
					time.Sleep(time.Minute)
					if st := poolStatus(t, m); st.Ready != pool.Replicas {
						t.Errorf("a minute after replicas: %d, %+v", pool.Replicas, st)
					}
				}
				if n := len(h.Folders()); n != 0 {
					t.Errorf("%d machines are left", n)
				}
			})
		})
	}
}

// TestRolloutMakesRoom: where there is no room for the layers of a new revision beside all
// that waits of the one before, maxUnavailable makes room for them.
func TestRolloutMakesRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := daemon(t, t.TempDir(), nodetest.NewHost(t), func(c *Config) {
			c.Builder, c.Capacity = &builder{pages: layerPages}, 2*64*mib+mib+mib/2
		})
		defer func() { _ = m.Close() }()
		must(t, second(m.ApplyTemplate(t.Context(), key("other"), sandbox.TemplateSpec{Image: "two", MilliCPUs: 1000, Memory: 64 * mib})))
		synctest.Wait()
		setUp(t, m, 2)
		none, two := 0, 2
		pool := sandbox.PoolSpec{Template: "other", Replicas: 2}
		applyPool(t, m, pool)
		time.Sleep(time.Minute)
		if st := poolStatus(t, m); st.Ready != 2 || !strings.Contains(st.Problem, "there is no room") {
			t.Errorf("without room for the new layers: %+v", st)
		}
		pool.MaxSurge, pool.MaxUnavailable = &none, &two
		applyPool(t, m, pool)
		time.Sleep(time.Minute)
		if st := poolStatus(t, m); st != (sandbox.PoolStatus{Phase: sandbox.PhaseReady, Ready: 2, Snapshots: 2}) {
			t.Errorf("with both unavailable: %+v", st)
		}
	})
}

// TestRolloutGoesOn: a stock of an earlier revision that served before the daemon was killed
// serves after that, until the new one does. Then it is gone, even if the daemon was killed
// before the last step.
func TestRolloutGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		broken := func(c *Config) { c.Builder = &neverReady{} }
		m := daemon(t, dir, h, broken)
		good := applyImage(t, m, "one")
		applyPool(t, m, sandbox.PoolSpec{Template: "python", Replicas: 2, Stage: sandbox.AfterInit})
		time.Sleep(time.Minute)
		bad := applyImage(t, m, "bad")
		time.Sleep(time.Hour)
		m.crash()
		for i := range 2 {
			m = daemon(t, dir, h, broken)
			time.Sleep(time.Hour)
			if st := poolStatus(t, m); st.Ready != 2 || st.Snapshots != 0 || !strings.Contains(st.Problem, "the ready check fails") {
				t.Errorf("an hour after a restart during a rollout: %+v", st)
			}
			if s := claim(t, m, fmt.Sprintf("a%d", i), sandbox.Lifetime{}); s.Revision != good.Revision {
				t.Errorf("a claim is of revision %s, not of %s, which serves", s.Revision, good.Revision)
			}
			synctest.Wait()
			m.crash()
		}
		m = daemon(t, dir, h) // where it does become ready
		defer func() { _ = m.Close() }()
		time.Sleep(time.Hour)
		if st := poolStatus(t, m); st != (sandbox.PoolStatus{Phase: sandbox.PhaseReady, Ready: 2, Snapshots: 2}) {
			t.Errorf("when the new revision is ready: %+v", st)
		}
		if s := claim(t, m, "b", sandbox.Lifetime{}); s.Revision != bad.Revision {
			t.Errorf("a claim is of revision %s, not of %s", s.Revision, bad.Revision)
		}
		wantFolders(t, m, snapshotsDir, 2) // one for each stage
		wantFolders(t, m, logsDir, 2)
	})
}

// TestEarlierRevisionIsDamaged: an earlier revision that cannot serve after a restart holds up
// nothing, and is gone when the new one serves.
func TestEarlierRevisionIsDamaged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h, func(c *Config) { c.Builder = &neverReady{} })
		good := applyImage(t, m, "one")
		applyPool(t, m, sandbox.PoolSpec{Template: "python", Replicas: 1, Stage: sandbox.AfterInit})
		time.Sleep(time.Minute)
		applyImage(t, m, "bad")
		time.Sleep(time.Hour)
		b, err := m.build(buildKey{Template: good.Key, Revision: good.Revision, Stage: sandbox.AfterInit})
		must(t, err)
		m.crash()
		must(t, os.RemoveAll(m.snapshotDir(b.Snapshot)))
		m = daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		time.Sleep(time.Hour)
		if st := poolStatus(t, m); st != (sandbox.PoolStatus{Phase: sandbox.PhaseReady, Ready: 1, Snapshots: 1}) {
			t.Errorf("when the new revision is ready: %+v", st)
		}
		wantFolders(t, m, logsDir, 2) // one for each stage
	})
}

// TestShare: during a rollout there are never more than replicas and maxSurge, and never
// fewer ready than replicas without maxUnavailable.
func TestShare(t *testing.T) {
	for replicas := range 12 {
		for surge := range 4 {
			for unavailable := range 4 {
				if surge+unavailable == 0 {
					continue
				}
				spec := sandbox.PoolSpec{Replicas: replicas, MaxSurge: &surge, MaxUnavailable: &unavailable}
				reached := 0
				for steps := 0; ; steps++ {
					older, current := share(spec, reached)
					if older+current > replicas+surge || older+reached < replicas-unavailable {
						t.Fatalf("%d replicas, surge %d, unavailable %d: %d of earlier revisions, %d of the current one, %d ready",
							replicas, surge, unavailable, older, current, reached)
					}
					if older == 0 && current == replicas {
						break
					}
					if steps > 2*replicas+2 {
						t.Fatalf("%d replicas, surge %d, unavailable %d: stuck with %d and %d", replicas, surge, unavailable, older, current)
					}
					reached = max(reached, current)
				}
			}
		}
	}
}

// TestPoolTurns: a pool that is applied and deleted at once either runs and is in the
// journal, or neither; one that is changed twice runs with the journal's spec.
func TestPoolTurns(t *testing.T) {
	m := daemon(t, t.TempDir(), nodetest.NewHost(t))
	defer func() { _ = m.Close() }()
	applyImage(t, m, "one")
	must(t, second(m.ApplyTemplate(t.Context(), key("other"), sandbox.TemplateSpec{Image: "two", MilliCPUs: 1000, Memory: 64 * mib})))
	spec := func(n int) sandbox.PoolSpec { // of two templates: those of one come one after the other
		return sandbox.PoolSpec{Template: []sandbox.Name{"python", "other"}[n], Replicas: n}
	}
	for i := range 300 {
		k := key(fmt.Sprintf("p%d", i))
		if _, err := m.ApplyPool(t.Context(), k, spec(0)); err != nil {
			t.Fatal(err)
		}
		var all sync.WaitGroup
		for n := range 8 {
			all.Go(func() { _, _ = m.ApplyPool(t.Context(), k, spec(n%2)) })
		}
		if i%2 == 0 {
			all.Go(func() { _ = m.DeletePool(t.Context(), k) })
		}
		all.Wait()
		p, _, err := m.Pool(t.Context(), k)
		m.mu.Lock()
		run := m.pools[k]
		m.mu.Unlock()
		if (err == nil) != (run != nil) {
			t.Fatalf("pool %d: in the journal %v, it runs %v", i, err, run != nil)
		}
		if run == nil {
			continue
		}
		run.mu.Lock()
		if run.spec.Replicas != p.Spec.Replicas {
			t.Errorf("pool %d runs with %d replicas, the journal has %d", i, run.spec.Replicas, p.Spec.Replicas)
		}
		run.mu.Unlock()
		if err := m.DeletePool(t.Context(), k); err != nil {
			t.Fatal(err)
		}
	}
}
