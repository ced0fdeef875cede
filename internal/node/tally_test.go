package node

import (
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

// counted is the status of the node, counted from the journal and the disk.
func counted(t *testing.T, m *Manager) (n sandbox.NodeStatus) {
	t.Helper()
	var usage snapshot.Usage
	must(t, m.db.View(func(tx *journal.Tx) error {
		must(t, sandboxes.Each(tx, "", func(_ string, s sandbox.Sandbox) error {
			if s.State != sandbox.Starting {
				n.Sandboxes++
			}
			if s.State == sandbox.Hibernated {
				n.Hibernated++
			}
			return nil
		}))
		must(t, checkpoints.Each(tx, "", func(_ string, c sandbox.Checkpoint) error {
			n.Checkpoints++
			return second(usage.Add(m.checkpointDir(c.ID)))
		}))
		return builds.Each(tx, "", func(_ string, b sandbox.Build) error {
			if b.Phase == sandbox.PhaseReady {
				digest, err := m.digest(b.Snapshot)
				must(t, err)
				n.Snapshots = append(n.Snapshots, sandbox.NodeSnapshot{Template: b.Template, Revision: b.Revision, Stage: b.Stage, Image: b.Image, Digest: digest})
			}
			return nil
		})
	}))
	n.CheckpointBytes = usage.Bytes
	return n
}

// wantCounted compares the status with the objects.
func wantCounted(t *testing.T, m *Manager, when string) {
	t.Helper()
	synctest.Wait()
	want := counted(t, m)
	got, err := m.Node(t.Context())
	if err != nil {
		t.Fatalf("%s: %v", when, err)
	}
	if got.Sandboxes != want.Sandboxes || got.Hibernated != want.Hibernated || got.Checkpoints != want.Checkpoints ||
		got.CheckpointBytes != want.CheckpointBytes || !slices.Equal(got.Snapshots, want.Snapshots) {
		t.Errorf("%s: the status says %d sandboxes, %d hibernated, %d checkpoints of %d bytes, snapshots %v; there are %d, %d, %d of %d, %v", when,
			got.Sandboxes, got.Hibernated, got.Checkpoints, got.CheckpointBytes, got.Snapshots,
			want.Sandboxes, want.Hibernated, want.Checkpoints, want.CheckpointBytes, want.Snapshots)
	}
}

// TestNodeCounts: the counts of the node's status match the objects, after each operation and
// in the next daemon.
func TestNodeCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		apply := func(name, image string) error {
			return second(m.ApplyTemplate(t.Context(), key(name), sandbox.TemplateSpec{Image: image, MilliCPUs: 1000, Memory: 64 * mib}))
		}
		for _, step := range []struct {
			name string
			do   func() error
		}{
			{"nothing", func() error { return nil }},
			{"a pool", func() error { setUp(t, m, 0); return nil }},
			{"claim", func() error { claim(t, m, "a", sandbox.Lifetime{}); return nil }},
			{"claim another", func() error { claim(t, m, "b", sandbox.Lifetime{}); return nil }},
			{"checkpoint", func() error { memory(t, h, m, "a")["x"] = "1"; checkpoint(t, m, "one", "a"); return nil }},
			{"hibernate", func() error { return second(m.Hibernate(t.Context(), key("a"))) }},
			{"checkpoint what is hibernated", func() error { checkpoint(t, m, "two", "a"); checkpoint(t, m, "three", "a"); return nil }},
			{"restart", func() error { must(t, m.Close()); m = daemon(t, dir, h); return nil }},
			{"delete a checkpoint", func() error { return m.DeleteCheckpoint(t.Context(), key("two")) }},
			{"take its name", func() error { checkpoint(t, m, "two", "b"); return nil }},
			{"wake", func() error { return second(m.Resume(t.Context(), key("a"))) }},
			{"restore", func() error {
				return second2(m.Restore(t.Context(), sandbox.RestoreRequest{Key: key("c"), Checkpoint: "three"}))
			}},
			{"build", func() error { return apply("other", "one") }},
			{"build another revision", func() error { return apply("other", "two") }},
			{"delete the template", func() error { return m.DeleteTemplate(t.Context(), key("other")) }},
			{"kill", func() error { return second(m.Kill(t.Context(), key("a"))) }},
			{"delete all checkpoints", func() error {
				for _, name := range []string{"one", "two", "three"} {
					must(t, m.DeleteCheckpoint(t.Context(), key(name)))
				}
				return nil
			}},
			{"restart again", func() error { must(t, m.Close()); m = daemon(t, dir, h); return nil }},
		} {
			if err := step.do(); err != nil {
				t.Fatalf("%s: %v", step.name, err)
			}
			wantCounted(t, m, step.name)
		}
	})
}

// unreadable puts an unreadable record into a collection, so that walks through it fail.
func unreadable(t *testing.T, m *Manager, collection, key string) {
	t.Helper()
	must(t, m.db.Update(func(tx *journal.Tx) error { return journal.Collection[string](collection).Put(tx, key, "x") }))
}

// TestNodeReadsNoRecords: reading the node's status reads neither the records of its
// objects nor, a second time, the folders of checkpoints.
func TestNodeReadsNoRecords(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		c := checkpoint(t, m, "c", "a")
		before, err := m.Node(t.Context())
		must(t, err)
		for _, collection := range []string{string(builds), string(checkpoints), string(sandboxes)} {
			unreadable(t, m, collection, "zz/unreadable/1/2")
		}
		must(t, m.removeSnapshot(m.checkpointDir(c.ID))) // as if no call had read it
		after, err := m.Node(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if before.CheckpointBytes == 0 || after.CheckpointBytes != before.CheckpointBytes || len(after.Snapshots) != 1 || after.Sandboxes != before.Sandboxes {
			t.Errorf("%+v, and then %+v", before, after)
		}
	})
}

// TestDeleteTemplateReadsNoPools: the deletion of a template knows whether a pool is of it,
// without a look at the pools of its namespace.
func TestDeleteTemplateReadsNoPools(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		for _, name := range []string{"one", "two"} {
			must(t, second(m.ApplyTemplate(t.Context(), key(name), sandbox.TemplateSpec{Image: name, MilliCPUs: 1000, Memory: 64 * mib})))
		}
		pool := func(template sandbox.Name) {
			t.Helper()
			must(t, second(m.ApplyPool(t.Context(), key("p"), sandbox.PoolSpec{Template: template, Stage: sandbox.AfterReady})))
			synctest.Wait()
		}
		pool("one")
		unreadable(t, m, string(pools), key("zz").String())
		if err := m.DeleteTemplate(t.Context(), key("one")); !sandbox.HasCode(err, sandbox.CodeConflict) {
			t.Errorf("a template with a pool: %v", err)
		}
		pool("two")
		must(t, m.DeleteTemplate(t.Context(), key("one")))
		if err := m.DeleteTemplate(t.Context(), key("two")); !sandbox.HasCode(err, sandbox.CodeConflict) {
			t.Errorf("a template with a pool: %v", err)
		}
		must(t, m.DeletePool(t.Context(), key("p")))
		must(t, m.DeleteTemplate(t.Context(), key("two")))
	})
}

// TestPoolOrTemplate: of those who make a pool of a template and those who delete the template
// at once one is refused, however often.
func TestPoolOrTemplate(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		for range 20 {
			must(t, second(m.ApplyTemplate(t.Context(), key("t"), sandbox.TemplateSpec{Image: "t", MilliCPUs: 1000, Memory: 64 * mib})))
			synctest.Wait()
			// Both would be in one transaction of the journal: while writes are blocked, the
			// second call reaches the journal, or waits for its turn.
			release := holdJournal(t, m)
			var applied, deleted error
			var both sync.WaitGroup
			both.Go(func() {
				applied = second(m.ApplyPool(t.Context(), key("p"), sandbox.PoolSpec{Template: "t", Stage: sandbox.AfterReady}))
			})
			synctest.Wait()
			both.Go(func() { deleted = m.DeleteTemplate(t.Context(), key("t")) })
			for range 1000 { // not Wait: a turn is a mutex
				runtime.Gosched()
			}
			release()
			both.Wait()
			if (applied == nil) == (deleted == nil) {
				t.Fatalf("the pool: %v; the template's deletion: %v", applied, deleted)
			}
			if applied == nil {
				must(t, m.DeletePool(t.Context(), key("p")))
				must(t, m.DeleteTemplate(t.Context(), key("t")))
			} else if !sandbox.HasCode(applied, sandbox.CodeNotFound) {
				t.Errorf("%v", applied)
			}
		}
	})
}
