package node

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// wantQuota checks what the default namespace uses.
func wantQuota(t *testing.T, m *Manager, sandboxes, machines int) {
	t.Helper()
	q, err := m.QuotaOf(t.Context(), sandbox.DefaultNamespace)
	if err != nil || q.UsedSandboxes != sandboxes || q.UsedMemory != uint64(machines)*64*mib {
		t.Errorf("%d sandboxes and %d MiB are used, not %d and %d (%v)", q.UsedSandboxes, q.UsedMemory/mib, sandboxes, machines*64, err)
	}
}

// wantOver: it was refused because of the namespace's quota.
func wantOver(t *testing.T, what string, err error) {
	t.Helper()
	if !sandbox.HasCode(err, sandbox.CodeCapacity) || !strings.Contains(err.Error(), "quota of namespace default") {
		t.Errorf("%s: %v", what, err)
	}
}

// TestQuota: claims, forks, refills and resumes stay within it, and it outlives
// the daemon. A sandbox that ends or hibernates gives back its share.
func TestQuota(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		ctx := t.Context()
		if _, err := m.SetQuota(ctx, sandbox.Quota{Namespace: sandbox.DefaultNamespace, Sandboxes: -1}); !sandbox.HasCode(err, sandbox.CodeInvalid) {
			t.Errorf("a negative quota: %v", err)
		}
		// A fork needs as much again as its source has, while it is made.
		if _, err := m.SetQuota(ctx, sandbox.Quota{Namespace: sandbox.DefaultNamespace, Memory: 4 * 64 * mib, Sandboxes: 4}); err != nil {
			t.Fatal(err)
		}
		claim(t, m, "a", sandbox.Lifetime{})
		claim(t, m, "b", sandbox.Lifetime{})
		f, _, err := m.Fork(ctx, sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 3}})
		if err != nil || f.Phase != sandbox.PhaseFailed || f.Children[0].Problem != "" || !strings.Contains(f.Children[1].Problem, "quota of namespace default") {
			t.Errorf("%+v, %v", f, err)
		}
		wantQuota(t, m, 3, 3)
		if _, err := m.SetQuota(ctx, sandbox.Quota{Namespace: sandbox.DefaultNamespace, Memory: 3 * 64 * mib, Sandboxes: 4}); err != nil {
			t.Fatal(err)
		}
		_, _, err = m.Claim(ctx, sandbox.ClaimRequest{Key: key("c"), Spec: sandbox.ClaimSpec{Pool: "pool"}})
		wantOver(t, "a claim beyond the memory", err)
		_, _, err = m.Fork(ctx, sandbox.ForkRequest{Key: key("g"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}})
		wantOver(t, "a fork beyond the memory", err)
		wantQuota(t, m, 3, 3)

		// Another namespace has nothing to do with it.
		other := sandbox.Key{Namespace: "other", Name: "python"}
		if _, err := m.ApplyTemplate(ctx, other, sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib}); err != nil {
			t.Fatal(err)
		}
		if _, err := m.ApplyPool(ctx, sandbox.Key{Namespace: "other", Name: "pool"}, sandbox.PoolSpec{Template: "python", Replicas: 1}); err != nil {
			t.Fatal(err)
		}
		if err := m.WaitPool(ctx, sandbox.Key{Namespace: "other", Name: "pool"}); err != nil {
			t.Fatal(err)
		}
		if _, _, err := m.Claim(ctx, sandbox.ClaimRequest{Key: sandbox.Key{Namespace: "other", Name: "x"}, Spec: sandbox.ClaimSpec{Pool: "pool"}}); err != nil {
			t.Error(err)
		}

		// A hibernated sandbox reserves no memory, but counts as a sandbox.
		if _, err := m.Hibernate(ctx, key("a")); err != nil {
			t.Fatal(err)
		}
		wantQuota(t, m, 3, 2)
		claim(t, m, "c", sandbox.Lifetime{})
		_, err = m.Resume(ctx, key("a"))
		wantOver(t, "a resume beyond the memory", err)
		if _, err := m.Hibernate(ctx, key("b")); err != nil {
			t.Fatal(err)
		}
		_, _, err = m.Claim(ctx, sandbox.ClaimRequest{Key: key("d"), Spec: sandbox.ClaimSpec{Pool: "pool"}})
		wantOver(t, "a fifth", err)
		if err == nil || !strings.Contains(err.Error(), "4 of 4 sandboxes") {
			t.Error(err)
		}
		wantQuota(t, m, 4, 2)

		// A pool waits for room, and gets it.
		if _, err := m.ApplyPool(ctx, key("pool"), sandbox.PoolSpec{Template: "python", Replicas: 2}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if _, st, err := m.Pool(ctx, key("pool")); err != nil || st.Ready != 1 || !strings.Contains(st.Problem, "quota of namespace default") {
			t.Errorf("%+v, %v", st, err)
		}
		wantQuota(t, m, 4, 3)

		// The next daemon knows it all.
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		m = daemon(t, dir, h)
		if err := m.WaitPool(ctx, key("pool")); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		wantQuota(t, m, 4, 3)
		_, _, err = m.Claim(ctx, sandbox.ClaimRequest{Key: key("d"), Spec: sandbox.ClaimSpec{Pool: "pool"}})
		wantOver(t, "after a restart", err)
		if _, err := m.Kill(ctx, key("c")); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Kill(ctx, key("a")); err != nil {
			t.Fatal(err)
		}
		claim(t, m, "d", sandbox.Lifetime{})

		// Without it, only the machine bounds.
		if q, err := m.SetQuota(ctx, sandbox.Quota{Namespace: sandbox.DefaultNamespace}); err != nil || q.Quota != (sandbox.Quota{Namespace: sandbox.DefaultNamespace}) {
			t.Errorf("%+v, %v", q, err)
		}
		if _, err := m.Resume(ctx, key("b")); err != nil {
			t.Error(err)
		}
		for i := range 3 {
			claim(t, m, fmt.Sprint("e", i), sandbox.Lifetime{})
		}
	})
}

// TestQuotaAtOnce: any number of concurrent calls stays within it, and a call
// that fails gives back its share.
func TestQuotaAtOnce(t *testing.T) {
	h := nodetest.NewHost(t)
	m := daemon(t, t.TempDir(), h)
	defer func() { _ = m.Close() }()
	if _, err := m.ApplyTemplate(t.Context(), key("python"), sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib}); err != nil {
		t.Fatal(err)
	}
	if _, err := m.ApplyPool(t.Context(), key("pool"), sandbox.PoolSpec{Template: "python"}); err != nil {
		t.Fatal(err)
	}
	if err := m.WaitPool(t.Context(), key("pool")); err != nil {
		t.Fatal(err)
	}
	const most = 7
	for name, q := range map[string]sandbox.Quota{"sandboxes": {Sandboxes: most}, "memory": {Memory: most*64*mib + mib}} {
		t.Run(name, func(t *testing.T) {
			q.Namespace = sandbox.DefaultNamespace
			if _, err := m.SetQuota(t.Context(), q); err != nil {
				t.Fatal(err)
			}
			var made atomic.Int32
			var all sync.WaitGroup
			for i := range 4 * most {
				all.Go(func() {
					_, _, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key(fmt.Sprintf("%s-%d", name, i)), Spec: sandbox.ClaimSpec{Pool: "pool"}})
					if err == nil {
						made.Add(1)
						return
					}
					wantOver(t, "a claim", err)
				})
			}
			all.Wait()
			if made.Load() != most {
				t.Errorf("%d were made, not %d", made.Load(), most)
			}
			wantQuota(t, m, most, most)
			list, err := m.Sandboxes(t.Context(), sandbox.SandboxesRequest{Namespace: sandbox.DefaultNamespace, Page: sandbox.Page{}, Ended: false})
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range list {
				all.Go(func() {
					if _, err := m.Kill(t.Context(), s.Key); err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			wantQuota(t, m, 0, 0)
		})
	}
}
