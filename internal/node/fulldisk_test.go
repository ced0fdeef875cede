package node

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// TestIntentIsTakenBack: where the journal cannot be written any more, a sandbox
// that was to wake is hibernated and one that was to hibernate runs, as the next
// daemon would find them, and both can be tried again.
func TestIntentIsTakenBack(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		ctx := t.Context()
		claim(t, m, "a", sandbox.Lifetime{})
		memory(t, h, m, "a")[nodetest.LayerKey] = layerPages
		// Step is called before and after the call that is to be the last with a journal.
		failing := func(do func(), want sandbox.State) {
			t.Helper()
			h.Step = func() { _ = m.db.Close() }
			do()
			h.Step = nil
			b, err := m.find(key("a"))
			must(t, err)
			if got := b.now().State; got != want {
				t.Errorf("it is %s, not %s", got, want)
			}
			m.db, err = journal.Open(filepath.Join(m.cfg.Dir, "journal"))
			must(t, err)
		}
		failing(func() {
			if _, err := m.Hibernate(ctx, key("a")); err == nil {
				t.Error("it hibernated without a journal")
			}
		}, sandbox.Running)
		wantReserved(t, m, h, 1, 0)
		must(t, second(m.Hibernate(ctx, key("a"))))
		failing(func() {
			if _, err := m.Resume(ctx, key("a")); err == nil {
				t.Error("it woke without a journal")
			}
		}, sandbox.Hibernated)
		wantReserved(t, m, h, 0, 0)
		must(t, third(m.Fork(ctx, sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}})))
	})
}

// TestFullDisk: a sandbox that does not fit on the disk runs on, says why, and
// leaves nothing behind.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=8m"); err != nil {
		t.Skipf("a small disk needs a mount: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	state := filepath.Join(dir, "state")
	must(t, os.Mkdir(state, 0o700))
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		m := daemon(t, state, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		claim(t, m, "a", sandbox.Lifetime{})
		h.Write(m.machineDir(wantState(t, m, "a", sandbox.Running).Machine), nodetest.LayerKey, "4096")
		for range 3 {
			_, err := m.Hibernate(t.Context(), key("a"))
			if !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("hibernated on a full disk: %v", err)
			}
			wantState(t, m, "a", sandbox.Running)
			wantFolders(t, m, imagesDir, 0)
			wantReserved(t, m, h, 1, 0)
			if _, _, err := m.Checkpoint(t.Context(), sandbox.CheckpointRequest{Key: key("c"), Source: "a"}); !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("checkpointed on a full disk: %v", err)
			}
			wantFolders(t, m, checkpointsDir, 0)
		}
		h.Write(m.machineDir(wantState(t, m, "a", sandbox.Running).Machine), nodetest.LayerKey, "256")
		must(t, second(m.Hibernate(t.Context(), key("a"))), second(m.Resume(t.Context(), key("a"))))
	})
}
