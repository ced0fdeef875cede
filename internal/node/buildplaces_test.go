package node

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// onGatedBuilds runs a test with a manager whose builds wait for the gate.
func onGatedBuilds(t *testing.T, test func(t *testing.T, m *Manager, gate chan struct{})) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		m := daemon(t, t.TempDir(), nodetest.NewHost(t), func(c *Config) { c.Builder = &builder{gate: gate} })
		defer func() { _ = m.Close() }()
		test(t, m, gate)
	})
}

// applyMany applies templates at once, all of them while none can be written to the journal,
// and returns how many were refused.
func applyMany(t *testing.T, m *Manager, count int) (refused int) {
	t.Helper()
	release := holdJournal(t, m)
	var all sync.WaitGroup
	errs := make([]error, count)
	for i := range count {
		all.Go(func() {
			_, errs[i] = m.ApplyTemplate(t.Context(), key(fmt.Sprint("t-", i)), sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib})
		})
	}
	synctest.Wait()
	release()
	all.Wait()
	for _, err := range errs {
		switch {
		case sandbox.HasCode(err, sandbox.CodeCapacity):
			refused++
		case err != nil:
			t.Error(err)
		}
	}
	return refused
}

// TestBuildsAdmittedAtOnce: of templates that are applied at once as many are built as may
// wait, also after all of these have failed; a template that was refused is not there.
func TestBuildsAdmittedAtOnce(t *testing.T) {
	onGatedBuilds(t, func(t *testing.T, m *Manager, gate chan struct{}) {
		if refused := applyMany(t, m, maxBuilds+30); refused != 30 {
			t.Errorf("%d are refused", refused)
		}
		under := func() int {
			synctest.Wait()
			return m.Overview().Builds
		}
		if n := under(); n != maxBuilds {
			t.Errorf("%d builds are under way", n)
		}
		if got, err := m.Templates(t.Context(), sandbox.DefaultNamespace, sandbox.Page{}); err != nil || len(got) != maxBuilds {
			t.Errorf("%d templates, %v", len(got), err)
		}
		// Each again: they are being built, and count once.
		for i := range maxBuilds + 30 {
			if _, err := m.Template(t.Context(), key(fmt.Sprint("t-", i))); err == nil {
				template(t, m, key(fmt.Sprint("t-", i)), "one")
			}
		}
		if n := under(); n != maxBuilds {
			t.Errorf("%d builds are under way after all were applied again", n)
		}
		close(gate)
		if n := under(); n != 0 || len(m.places.used) != 0 || len(m.places.holders) != 0 {
			t.Errorf("%d builds are under way, %+v", n, m.places)
		}
	})
}

// TestFailedBuildsAdmitted: templates whose builds have failed are built again by as many at
// once as may wait.
func TestFailedBuildsAdmitted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &builder{fail: fmt.Errorf("no")}
		m := daemon(t, t.TempDir(), nodetest.NewHost(t), func(c *Config) { c.Builder = b })
		defer func() { _ = m.Close() }()
		const count = maxBuilds + 30
		for i := range count {
			template(t, m, key(fmt.Sprint("t-", i)), "one")
			synctest.Wait()
		}
		b.gate = make(chan struct{})
		if refused := applyMany(t, m, count); refused != 30 {
			t.Errorf("%d are refused", refused)
		}
		if n := m.Overview().Builds; n != maxBuilds {
			t.Errorf("%d builds are under way", n)
		}
	})
}

// TestPoolWaitsForABuild: a pool that needs a build of its own waits where its namespace has
// enough, says so, and has it when another build has ended. Another namespace does not wait.
func TestPoolWaitsForABuild(t *testing.T) {
	onGatedBuilds(t, func(t *testing.T, m *Manager, gate chan struct{}) {
		applyMany(t, m, maxBuilds)
		must(t, second(m.ApplyPool(t.Context(), key("pool"), sandbox.PoolSpec{Template: "t-0", Stage: sandbox.AfterInit})))
		synctest.Wait()
		_, st, err := m.Pool(t.Context(), key("pool"))
		if err != nil || st.Phase != sandbox.PhasePending || !strings.Contains(st.Problem, "too many templates") {
			t.Errorf("%+v, %v", st, err)
		}
		if n := m.Overview().Builds; n != maxBuilds {
			t.Errorf("%d builds are under way", n)
		}
		template(t, m, other("python"), "one")
		close(gate)
		must(t, m.WaitPool(t.Context(), key("pool")))
	})
}

// TestRecoveredBuildsAreNotRefused: a daemon goes on with any number of builds of the one
// before.
func TestRecoveredBuildsAreNotRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		gated := func(c *Config) { c.Builder = &builder{gate: make(chan struct{})} }
		m := daemon(t, dir, h, gated)
		applyMany(t, m, maxBuilds)
		m.mu.Lock()
		m.places = newBuildPlaces() // as if there had been more places
		m.mu.Unlock()
		template(t, m, key("more"), "one")
		synctest.Wait()
		m.crash()
		m = daemon(t, dir, h, gated)
		defer func() { _ = m.Close() }()
		synctest.Wait()
		if n := m.Overview().Builds; n != maxBuilds+1 {
			t.Errorf("%d builds are under way", n)
		}
	})
}
