package node

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// layerPages is the size of a layer of memory in these tests: a mebibyte.
const layerPages = "256"

// wantReserved checks what is reserved of the node, and that the layers in memory
// are part of it.
func wantReserved(t *testing.T, m *Manager, h *nodetest.Host, machines, layers int) {
	t.Helper()
	if got, want := m.capacity.reserved(), uint64(machines)*64*mib+uint64(layers)*mib; got != want {
		t.Errorf("%.1f MiB are reserved, not %.1f", float64(got)/mib, float64(want)/mib)
	}
	if h.Resident() > uint64(layers)*mib {
		t.Errorf("%d MiB of layers are in memory, and %d are reserved", h.Resident()/mib, layers)
	}
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func second[T any](_ T, err error) error { return err }

func third[T, U any](_ T, _ U, err error) error { return err }

// TestHibernationFrees: a hibernated sandbox has nothing in memory. At no step is
// more in memory than is reserved. Waking reserves the memory that was written,
// any number of times, and also after a crash of the daemon.
func TestHibernationFrees(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		ctx := t.Context()
		h.Step = func() {
			if layers := h.Resident(); layers > m.capacity.reserved() {
				t.Errorf("%d bytes are in memory, %d are reserved", layers, m.capacity.reserved())
			}
		}
		claim(t, m, "a", sandbox.Lifetime{})
		claim(t, m, "b", sandbox.Lifetime{})
		memory(t, h, m, "a")[nodetest.LayerKey] = layerPages
		for range 20 {
			must(t, second(m.Hibernate(ctx, key("a"))))
			wantReserved(t, m, h, 1, 0)
			must(t, second(m.Resume(ctx, key("a"))))
			wantReserved(t, m, h, 2, 1)
		}
		c, err := m.Cost(ctx, key("a"))
		if err != nil || c.Reserved != 65*mib {
			t.Errorf("it has reserved %d bytes, %v", c.Reserved, err)
		}
		h.Step = nil
		m.crash()
		m = daemon(t, dir, h)
		wantReserved(t, m, h, 2, 1)
		// One that cannot be woken takes nothing.
		must(t, second(m.Hibernate(ctx, key("a"))))
		h.FailNext(errors.New("no machine"))
		if _, err := m.Resume(ctx, key("a")); err == nil {
			t.Error("it woke without a machine")
		}
		wantReserved(t, m, h, 1, 0)
		must(t, second(m.Resume(ctx, key("a"))), second(m.Kill(ctx, key("a"))))
		wantReserved(t, m, h, 1, 0)
	})
}

// TestWakingNeedsRoom: there is room for the sandbox, and none for its layer.
func TestWakingNeedsRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		m := daemon(t, t.TempDir(), h, func(c *Config) { c.Capacity = 2*64*mib + mib/2 })
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		claim(t, m, "a", sandbox.Lifetime{})
		memory(t, h, m, "a")[nodetest.LayerKey] = layerPages
		must(t, second(m.Hibernate(t.Context(), key("a"))))
		claim(t, m, "b", sandbox.Lifetime{})
		if _, err := m.Resume(t.Context(), key("a")); !sandbox.HasCode(err, sandbox.CodeCapacity) {
			t.Errorf("it woke: %v", err)
		}
		wantState(t, m, "a", sandbox.Hibernated)
		must(t, second(m.Kill(t.Context(), key("b"))), second(m.Resume(t.Context(), key("a"))))
		wantReserved(t, m, h, 1, 1)
	})
}

// TestLayersAreChargedOnce: sandboxes of one checkpoint share its layer, until the
// last of them has ended; so do the children of a live fork and their source.
func TestLayersAreChargedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		ctx := t.Context()
		claim(t, m, "a", sandbox.Lifetime{})
		memory(t, h, m, "a")[nodetest.LayerKey] = layerPages
		checkpoint(t, m, "c", "a")
		wantReserved(t, m, h, 1, 0)
		for _, name := range []string{"r", "s"} {
			must(t, third(m.Restore(ctx, sandbox.RestoreRequest{Key: key(name), Checkpoint: "c", Spec: sandbox.RestoreSpec{}})))
		}
		wantReserved(t, m, h, 3, 1)
		memory(t, h, m, "r")[nodetest.LiveKey] = fmt.Sprint(2 * mib)
		must(t, third(m.Fork(ctx, sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "r", Replicas: 2}})))
		wantReserved(t, m, h, 5, 3)
		must(t, second(m.Kill(ctx, key("r"))))
		wantReserved(t, m, h, 4, 3)
		m.crash()
		m = daemon(t, dir, h)
		wantReserved(t, m, h, 4, 3)
		must(t, second(m.Kill(ctx, key("s"))), second(m.Hibernate(ctx, key("f-1"))))
		wantReserved(t, m, h, 2, 3)
		must(t, second(m.Kill(ctx, key("f-2"))))
		wantReserved(t, m, h, 1, 0)
	})
}

// TestCapturesReserve: a live fork and a checkpoint of a sandbox that runs need
// room for a second copy of it; a checkpoint of one that stands still does not.
func TestCapturesReserve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		m := daemon(t, t.TempDir(), h, func(c *Config) { c.Capacity = 3*64*mib - 1 })
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		ctx := t.Context()
		claim(t, m, "a", sandbox.Lifetime{})
		most := uint64(0)
		h.Step = func() { most = max(most, m.capacity.reserved()) }
		if _, _, err := m.Fork(ctx, sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}}); !sandbox.HasCode(err, sandbox.CodeCapacity) {
			t.Errorf("a fork without room: %v", err)
		}
		wantReserved(t, m, h, 1, 0)
		checkpoint(t, m, "c", "a")
		if most != 2*64*mib {
			t.Errorf("%d MiB were reserved while a checkpoint was written", most/mib)
		}
		claim(t, m, "b", sandbox.Lifetime{})
		if _, _, err := m.Checkpoint(ctx, sandbox.CheckpointRequest{Key: key("d"), Source: "a"}); !sandbox.HasCode(err, sandbox.CodeCapacity) || !strings.Contains(err.Error(), "pause a first") {
			t.Errorf("a checkpoint without room: %v", err)
		}
		must(t, second(m.Pause(ctx, key("a"))))
		checkpoint(t, m, "d", "a")
		wantReserved(t, m, h, 2, 0)
		must(t, second(m.Kill(ctx, key("b"))))
		// A fork that fails leaves nothing reserved.
		h.FailNext(errors.New("no machine"))
		m.capacity.capacity = 1 << 40
		must(t, third(m.Fork(ctx, sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}})))
		wantReserved(t, m, h, 1, 0)
	})
}

// TestCaptureIsInTheJournal: a daemon that is killed while it forks counts what
// the fork may have left in memory.
func TestCaptureIsInTheJournal(t *testing.T) {
	dir, picture := t.TempDir(), t.TempDir()
	var running map[string]map[string]string
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		s := claim(t, m, "a", sandbox.Lifetime{})
		h.Step = func() {
			if running == nil {
				copyState(t, dir, picture)
				running = map[string]map[string]string{strings.Replace(m.machineDir(s.Machine), dir, picture, 1): {}}
			}
		}
		must(t, third(m.Fork(t.Context(), sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}})))
		h.Step = nil
	})
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		for folder, memory := range running {
			h.Put(folder, memory)
		}
		m := daemon(t, picture, h)
		defer func() { _ = m.Close() }()
		wantReserved(t, m, h, 2, 0)
		must(t, second(m.Kill(t.Context(), key("a"))))
		wantReserved(t, m, h, 0, 0)
	})
}

// TestTemplatesAreCharged: the layer of a template is in memory, and its namespace
// is charged for it, while a pool or a sandbox has it.
func TestTemplatesAreCharged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		m := daemon(t, t.TempDir(), h, func(c *Config) { c.Builder = &builder{pages: layerPages} })
		defer func() { _ = m.Close() }()
		setUp(t, m, 2)
		wantReserved(t, m, h, 2, 1)
		claim(t, m, "a", sandbox.Lifetime{})
		synctest.Wait()
		wantReserved(t, m, h, 3, 1)
		must(t, m.DeletePool(t.Context(), key("pool")))
		wantReserved(t, m, h, 1, 1)
		must(t, second(m.Kill(t.Context(), key("a"))))
		wantReserved(t, m, h, 0, 0)
	})
}

// TestStorageQuota: the bytes of hibernated sandboxes and checkpoints on disk
// count. Storage beyond the quota is refused and changes nothing.
func TestStorageQuota(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		ctx := t.Context()
		stored := func(mibs int) {
			t.Helper()
			q, err := m.QuotaOf(ctx, sandbox.DefaultNamespace)
			if err != nil || q.UsedStorage/mib != uint64(mibs) {
				t.Errorf("%d bytes are stored, not %d MiB (%v)", q.UsedStorage, mibs, err)
			}
		}
		for _, name := range []string{"a", "b", "c"} {
			claim(t, m, name, sandbox.Lifetime{IdleTimeout: time.Hour, OnTimeout: sandbox.TimeoutHibernate})
			memory(t, h, m, name)[nodetest.LayerKey] = layerPages
		}
		must(t, second(m.SetQuota(ctx, sandbox.Quota{Namespace: sandbox.DefaultNamespace, Storage: 2*mib + mib/2})))
		must(t, second(m.Hibernate(ctx, key("a"))))
		stored(1)
		checkpoint(t, m, "k", "a")
		stored(2)
		_, err := m.Hibernate(ctx, key("b"))
		wantOver(t, "a hibernation beyond the storage", err)
		wantState(t, m, "b", sandbox.Running)
		wantFolders(t, m, imagesDir, 1)
		_, _, err = m.Checkpoint(ctx, sandbox.CheckpointRequest{Key: key("l"), Source: "b"})
		wantOver(t, "a checkpoint beyond the storage", err)
		wantFolders(t, m, checkpointsDir, 1)
		stored(2)
		// A timeout that cannot hibernate leaves it running, and comes again.
		time.Sleep(time.Hour + time.Second)
		synctest.Wait()
		wantState(t, m, "b", sandbox.Running)
		stored(2)
		must(t, m.Close())
		m = daemon(t, dir, h)
		stored(2)
		must(t, m.DeleteCheckpoint(ctx, key("k")))
		stored(1)
		must(t, second(m.Hibernate(ctx, key("b"))))
		stored(2)
		must(t, second(m.Resume(ctx, key("a"))))
		stored(1)
		must(t, second(m.Kill(ctx, key("b"))))
		stored(0)
		// One that is full refuses before anything is written.
		must(t, second(m.Hibernate(ctx, key("a"))), second(m.SetQuota(ctx, sandbox.Quota{Namespace: sandbox.DefaultNamespace, Storage: mib})))
		paused := 0
		h.Step = func() { paused++ }
		_, err = m.Hibernate(ctx, key("c"))
		wantOver(t, "a hibernation with a full quota", err)
		if paused > 0 {
			t.Error("it was paused before it was refused")
		}
	})
}

var _ engine.Engine = (*nodetest.Host)(nil)
