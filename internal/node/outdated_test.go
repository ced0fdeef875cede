package node

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// ofBuild makes templates that say which AgentRun has made them.
type ofBuild struct {
	builder
	host *nodetest.Host
}

func (b *ofBuild) Build(ctx context.Context, req BuildRequest) (sandbox.Built, error) {
	b.extra = map[string]string{nodetest.BuildKey: b.host.Build()}
	return b.builder.Build(ctx, req)
}

// updateDaemon ends a daemon and starts one of another AgentRun, whose builds wait for the
// gate.
func updateDaemon(t *testing.T, dir string, h *nodetest.Host, was *Manager, gate chan struct{}, build string, lost ...string) *Manager {
	t.Helper()
	if was != nil {
		must(t, was.Close())
	}
	h.Update(build, lost...)
	return daemon(t, dir, h, func(c *Config) { c.Builder = &ofBuild{builder: builder{gate: gate}, host: h} })
}

// madeBy is which AgentRun has made what a new claim gets.
func madeBy(t *testing.T, h *nodetest.Host, m *Manager, name string) string {
	t.Helper()
	claim(t, m, name, sandbox.Lifetime{})
	return memory(t, h, m, name)[nodetest.BuildKey]
}

// TestOutdatedSnapshot: after an update a template's snapshot is made again. The pool says
// that it is Building, and why. The old snapshot serves claims until the new one does, even
// if the daemon is restarted or the update taken back in the meantime. Then it is gone, and
// the program that made it is not needed any more.
func TestOutdatedSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		open, shut := make(chan struct{}), make(chan struct{})
		close(open)
		m := updateDaemon(t, dir, h, nil, open, "one")
		defer func() { _ = m.Close() }()
		setUp(t, m, 2)
		time.Sleep(time.Minute)
		for restart := range 2 {
			m = updateDaemon(t, dir, h, m, shut, "two")
			time.Sleep(time.Minute)
			want := sandbox.PoolStatus{Phase: sandbox.PhaseBuilding, Ready: 2, Problem: "template python: its snapshot is made anew: build one has made it"}
			if st := poolStatus(t, m); st != want {
				t.Errorf("while it is built: %+v", st)
			}
			for i := range 5 { // more than wait
				if build := madeBy(t, h, m, fmt.Sprintf("claim-%d-%d", restart, i)); build != "one" {
					t.Errorf("a claim while it is built gets build %q", build)
				}
			}
		}
		m = updateDaemon(t, dir, h, m, open, "two")
		time.Sleep(time.Minute)
		if st := poolStatus(t, m); st != (sandbox.PoolStatus{Phase: sandbox.PhaseReady, Ready: 2, Snapshots: 2}) {
			t.Errorf("when it is built: %+v", st)
		}
		if build := madeBy(t, h, m, "after"); build != "two" {
			t.Errorf("a claim gets build %q", build)
		}
		wantFolders(t, m, snapshotsDir, 1)
		if h.Needs("one") || !h.Needs("two") {
			t.Error("the engine was not told what is needed")
		}
		// A hibernated sandbox and a checkpoint of an AgentRun keep what made them.
		_, err := m.Hibernate(t.Context(), key("after"))
		must(t, err)
		m = updateDaemon(t, dir, h, m, open, "one")
		time.Sleep(time.Minute)
		if build := madeBy(t, h, m, "back"); build != "one" || !h.Needs("two") {
			t.Errorf("taken back, a claim gets build %q; two is needed: %v", build, h.Needs("two"))
		}
		_, err = m.Kill(t.Context(), key("after"))
		must(t, err)
		time.Sleep(time.Minute)
		if h.Needs("two") {
			t.Error("what nothing was made by is needed")
		}
	})
}

// TestOutdatedWithinQuota: while a snapshot is made anew the namespace pays for one of the
// two, also after a restart in between.
func TestOutdatedWithinQuota(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		open, shut := make(chan struct{}), make(chan struct{})
		close(open)
		m := updateDaemon(t, dir, h, nil, open, "one")
		defer func() { _ = m.Close() }()
		setUp(t, m, 1)
		time.Sleep(time.Minute)
		q, err := m.QuotaOf(t.Context(), sandbox.DefaultNamespace)
		must(t, err)
		used := q.UsedStorage
		if used == 0 {
			t.Fatal("a template takes nothing")
		}
		must(t, second(m.SetQuota(t.Context(), sandbox.Quota{Namespace: sandbox.DefaultNamespace, Storage: used * 3 / 2})))
		for _, gate := range []chan struct{}{shut, shut, open} {
			m = updateDaemon(t, dir, h, m, gate, "two")
			time.Sleep(time.Minute)
		}
		if build := madeBy(t, h, m, "after"); build != "two" {
			t.Errorf("a claim gets build %q: %+v", build, poolStatus(t, m))
		}
		if q, err = m.QuotaOf(t.Context(), sandbox.DefaultNamespace); err != nil || q.UsedStorage != used {
			t.Errorf("%d bytes are stored, not %d (%v)", q.UsedStorage, used, err)
		}
	})
}

// TestOutdatedWaits: where snapshots are made anew one after the other, the pool of one that
// waits for its turn says so, and still why it is made anew.
func TestOutdatedWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		open, shut := make(chan struct{}), make(chan struct{})
		close(open)
		m := updateDaemon(t, dir, h, nil, open, "one")
		setUp(t, m, 1)
		setUpIn(t, m, "other")
		must(t, m.Close())
		h.Update("two")
		m = daemon(t, dir, h, func(c *Config) {
			c.Builder, c.Builds = &ofBuild{builder: builder{gate: shut}, host: h}, 1
		})
		defer func() { _ = m.Close() }()
		synctest.Wait()
		waiting := 0
		for _, n := range []sandbox.Namespace{sandbox.DefaultNamespace, "other"} {
			_, st, err := m.Pool(t.Context(), sandbox.Key{Namespace: n, Name: "pool"})
			must(t, err)
			if !strings.Contains(st.Problem, "its snapshot is made anew: build one has made it") {
				t.Errorf("the pool of %s says %q", n, st.Problem)
			}
			if strings.Contains(st.Problem, "; it waits for its turn") {
				waiting++
			}
		}
		if waiting != 1 {
			t.Errorf("%d pools say that they wait, not 1", waiting)
		}
	})
}

// TestUnusableSnapshot: a template's snapshot that the engine cannot restore any more is made
// anew; the pool has nothing meanwhile, and says so.
func TestUnusableSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		open, shut := make(chan struct{}), make(chan struct{})
		close(open)
		m := updateDaemon(t, dir, h, nil, open, "one")
		defer func() { _ = m.Close() }()
		setUp(t, m, 2)
		time.Sleep(time.Minute)
		m = updateDaemon(t, dir, h, m, shut, "two", "one")
		time.Sleep(time.Minute)
		if st := poolStatus(t, m); st.Phase != sandbox.PhaseBuilding || st.Ready != 0 {
			t.Errorf("while it is built: %+v", st)
		}
		_, _, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key("early"), Spec: sandbox.ClaimSpec{Pool: "pool"}})
		if !sandbox.HasCode(err, sandbox.CodeNotReady) {
			t.Errorf("a claim while it is built: %v", err)
		}
		m = updateDaemon(t, dir, h, m, open, "two", "one")
		time.Sleep(time.Minute)
		if st := poolStatus(t, m); st != (sandbox.PoolStatus{Phase: sandbox.PhaseReady, Ready: 2, Snapshots: 2}) {
			t.Errorf("when it is built: %+v", st)
		}
		wantFolders(t, m, snapshotsDir, 1)
		wantFolders(t, m, logsDir, 1)
	})
}
