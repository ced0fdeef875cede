package node

import (
	"context"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

// TestPoolWaitsForRoom: a pool whose template had no room comes up when another
// pool is deleted that had the memory.
func TestPoolWaitsForRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		m := daemon(t, t.TempDir(), h, func(c *Config) {
			c.Builder, c.Capacity = &builder{pages: layerPages}, 2*64*mib+mib+mib/2
		})
		defer func() { _ = m.Close() }()
		for _, name := range []string{"a", "b"} {
			must(t, second(m.ApplyTemplate(t.Context(), key(name), sandbox.TemplateSpec{Image: name, MilliCPUs: 1000, Memory: 64 * mib})),
				second(m.ApplyPool(t.Context(), key(name), sandbox.PoolSpec{Template: sandbox.Name(name)})), m.WaitPool(t.Context(), key(name)))
		}
		must(t, m.DeletePool(t.Context(), key("b")), second(m.ApplyPool(t.Context(), key("a"), sandbox.PoolSpec{Template: "a", Replicas: 2})))
		synctest.Wait()
		must(t, second(m.ApplyPool(t.Context(), key("b"), sandbox.PoolSpec{Template: "b", Replicas: 1})))
		synctest.Wait()
		if _, st, err := m.Pool(t.Context(), key("b")); err != nil || st.Phase != sandbox.PhaseFailed {
			t.Fatalf("there is room for it: %+v, %v", st, err)
		}
		must(t, m.DeletePool(t.Context(), key("a")))
		// Pool b may try while a has some of its memory, and again after a while.
		time.Sleep(time.Minute)
		synctest.Wait()
		if _, st, err := m.Pool(t.Context(), key("b")); err != nil || st.Ready != 1 {
			t.Errorf("%+v, %v", st, err)
		}
	})
}

// TestChangeWithoutRoom: a pool whose template has changed, and which has no memory
// to be full of the new revision, still becomes smaller when it is told to.
func TestChangeWithoutRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		m := daemon(t, t.TempDir(), h, func(c *Config) { c.Capacity = 5 * 64 * mib })
		defer func() { _ = m.Close() }()
		setUp(t, m, 4)
		must(t, second(m.ApplyTemplate(t.Context(), key("python"), sandbox.TemplateSpec{Image: "two", MilliCPUs: 1000, Memory: 64 * mib})))
		time.Sleep(time.Minute)
		must(t, second(m.ApplyPool(t.Context(), key("pool"), sandbox.PoolSpec{Template: "python", Replicas: 1})))
		synctest.Wait()
		if _, st, err := m.Pool(t.Context(), key("pool")); err != nil || st.Snapshots != 1 || len(h.Folders()) != 1 {
			t.Errorf("%+v, %v, %d machines", st, err, len(h.Folders()))
		}
	})
}

// keepingHost counts how often it was told what is in use.
type keepingHost struct {
	*nodetest.Host
	kept atomic.Int32
}

func (h *keepingHost) Keep(folders, snapshots []string) error {
	h.kept.Add(1)
	return h.Host.Keep(folders, snapshots)
}

// TestLeftInMemory: a daemon that was killed while it woke a sandbox leaves a layer
// in memory that no namespace is charged for. The next daemon frees it.
func TestLeftInMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &keepingHost{Host: nodetest.NewHost(t)}
		m := daemon(t, t.TempDir(), h.Host, func(c *Config) { c.Engine = h })
		defer func() { _ = m.Close() }()
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := h.kept.Load(); n != 1 {
			t.Errorf("the engine was told %d times what is in use", n)
		}
	})
}

// TestStorageOfOldJournals: data that an earlier version has stored without
// counting it is counted.
func TestStorageOfOldJournals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		setUp(t, m, 0)
		template, err := m.QuotaOf(t.Context(), sandbox.DefaultNamespace)
		must(t, err)
		claim(t, m, "a", sandbox.Lifetime{})
		memory(t, h, m, "a")[nodetest.LayerKey] = layerPages
		must(t, second(m.Hibernate(t.Context(), key("a"))))
		checkpoint(t, m, "c", "a")
		use, err := m.QuotaOf(t.Context(), sandbox.DefaultNamespace)
		must(t, err, m.Close())
		db, err := journal.Open(filepath.Join(dir, "journal"))
		must(t, err, db.Update(func(tx *journal.Tx) error {
			var s sandbox.Sandbox
			must(t, sandboxes.Each(tx, "", func(_ string, one sandbox.Sandbox) error { s = one; return nil }))
			s.Kept = 0
			c, _, err := checkpoints.Get(tx, key("c").String())
			c.Kept = 0
			var b sandbox.Build
			must(t, builds.Each(tx, "", func(_ string, one sandbox.Build) error { b = one; return nil }))
			b.Kept = 0
			must(t, err, builds.Put(tx, keyOf(b).String(), b), sandboxes.Put(tx, string(s.ID), s), checkpoints.Put(tx, key("c").String(), c))
			return nil
		}), db.Close())
		m = daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		stored := func(want uint64) {
			t.Helper()
			if q, err := m.QuotaOf(t.Context(), sandbox.DefaultNamespace); err != nil || q.UsedStorage != want {
				t.Errorf("%d bytes are stored, not %d (%v)", q.UsedStorage, want, err)
			}
		}
		stored(use.UsedStorage)
		must(t, second(m.Resume(t.Context(), key("a"))))
		stored(template.UsedStorage + (use.UsedStorage-template.UsedStorage)/2)
		must(t, m.DeleteCheckpoint(t.Context(), key("c")))
		stored(template.UsedStorage)
		must(t, m.DeletePool(t.Context(), key("pool")), m.DeleteTemplate(t.Context(), key("python")))
		stored(0)
	})
}

// copyingHost is a host whose sandboxes have nothing in common with their forks, as
// those of gVisor.
type copyingHost struct{ *nodetest.Host }

func (h copyingHost) Fork(ctx context.Context, snap *snapshot.Snapshot, o engine.ForkOptions) (engine.Sandbox, error) {
	sb, err := h.Host.Fork(ctx, snap, o)
	return copying{sb}, err
}

type copying struct{ engine.Sandbox }

func (s copying) Fork(ctx context.Context, opts []engine.ForkOptions) (*engine.LiveFork, error) {
	live, err := s.Sandbox.Fork(ctx, opts)
	if err != nil {
		return nil, err
	}
	live.Held, live.Source, live.Same = []engine.Held{{ID: "live-" + string(sandbox.NewID()), Bytes: 2 * mib}}, nil, true
	for i, sb := range live.Forks {
		live.Forks[i] = copying{sb}
	}
	return live, nil
}

// TestForkOfCopy: a sandbox that was forked, and then forks, goes on holding the
// capture that it was made of.
func TestForkOfCopy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		m := daemon(t, t.TempDir(), h, func(c *Config) { c.Engine = copyingHost{h} })
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		claim(t, m, "a", sandbox.Lifetime{})
		must(t, third(m.Fork(t.Context(), sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}})))
		wantReserved(t, m, h, 2, 2)
		must(t, third(m.Fork(t.Context(), sandbox.ForkRequest{Key: key("g"), Spec: sandbox.ForkSpec{Source: "f-1", Replicas: 1}})))
		wantReserved(t, m, h, 3, 4)
		must(t, second(m.Kill(t.Context(), key("f-1"))))
		wantReserved(t, m, h, 2, 2)
		must(t, second(m.Kill(t.Context(), key("g-1"))), second(m.Kill(t.Context(), key("a"))))
		wantReserved(t, m, h, 0, 0)
	})
}
