package node

import (
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// holdJournal blocks all writes to the journal until release.
func holdJournal(t *testing.T, m *Manager) (release func()) {
	t.Helper()
	gate, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		if err := m.db.Update(func(*journal.Tx) error { <-gate; return nil }); err != nil {
			t.Error(err)
		}
	}()
	synctest.Wait()
	return func() { close(gate); <-done }
}

// TestClaimWaitsAlone: while a claim waits for the disk, its name is taken and counts,
// and other calls do not wait.
func TestClaimWaitsAlone(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		claim(t, m, "there", sandbox.Lifetime{})
		release := holdJournal(t, m)
		claimed := make(chan error, 1)
		go func() {
			_, _, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key("slow"), Spec: sandbox.ClaimSpec{Pool: "pool"}})
			claimed <- err
		}()
		synctest.Wait()
		if !m.mu.TryLock() {
			release()
			t.Fatal("a claim that waits for the disk keeps everybody from the manager")
		}
		m.mu.Unlock()
		if _, err := m.Sandbox(t.Context(), key("there")); err != nil {
			t.Error(err)
		}
		if _, err := m.Sandbox(t.Context(), key("slow")); !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Errorf("one that is being claimed: %v", err)
		}
		if q, err := m.QuotaOf(t.Context(), sandbox.DefaultNamespace); err != nil || q.UsedSandboxes != 2 {
			t.Errorf("%d sandboxes are counted, %v", q.UsedSandboxes, err)
		}
		_, _, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key("slow"), Spec: sandbox.ClaimSpec{Pool: "pool"}})
		if !sandbox.HasCode(err, sandbox.CodeExists) {
			t.Errorf("a second claim of the name: %v", err)
		}
		release()
		if err := <-claimed; err != nil {
			t.Error(err)
		}
	})
}

// TestCollectsBuildsAlone: no call waits while unused builds are deleted.
func TestCollectsBuildsAlone(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		var first sandbox.Template
		for _, image := range []string{"one", "two"} {
			made, err := m.ApplyTemplate(t.Context(), key("other"), sandbox.TemplateSpec{Image: image, MilliCPUs: 1000, Memory: 64 * mib})
			if err != nil {
				t.Fatal(err)
			}
			if first.Revision == "" {
				first = made
			}
			synctest.Wait()
		}
		release := holdJournal(t, m)
		collected := make(chan error, 1)
		go func() { collected <- m.collectBuilds() }()
		synctest.Wait()
		if !m.mu.TryLock() {
			release()
			t.Fatal("the collection of builds keeps everybody from the manager")
		}
		m.mu.Unlock()
		release()
		if err := <-collected; err != nil {
			t.Error(err)
		}
		if left, err := m.Builds(t.Context(), first); err != nil || len(left) != 0 {
			t.Errorf("%v is left, %v", left, err)
		}
	})
}

// TestCheckpointGoesAlone: no call waits while a checkpoint is deleted from the journal,
// and no sandbox is made of it then.
func TestCheckpointGoesAlone(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		must(t, second2(m.Checkpoint(t.Context(), sandbox.CheckpointRequest{Key: key("c"), Source: "a"})))
		release := holdJournal(t, m)
		deleted := make(chan error, 1)
		go func() { deleted <- m.DeleteCheckpoint(t.Context(), key("c")) }()
		synctest.Wait()
		if !m.mu.TryLock() {
			release()
			t.Fatal("the deletion of a checkpoint keeps everybody from the manager")
		}
		m.mu.Unlock()
		_, _, err := m.Restore(t.Context(), sandbox.RestoreRequest{Key: key("r"), Checkpoint: "c"})
		if !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Errorf("restored what is being deleted: %v", err)
		}
		if err := m.DeleteCheckpoint(t.Context(), key("c")); !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Errorf("deleted twice: %v", err)
		}
		release()
		must(t, <-deleted)
		must(t, second2(m.Checkpoint(t.Context(), sandbox.CheckpointRequest{Key: key("c"), Source: "a"}))) // its name is free
	})
}

// TestSecretIsWrittenAlone: while a secret is written to the disk others can be read, and
// this one as it was.
func TestSecretIsWrittenAlone(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		must(t, second(m.ApplySecret(t.Context(), key("a"), sandbox.SecretData{"K": []byte("old")})))
		gate, done := make(chan struct{}), make(chan error, 1)
		go func() {
			_, err := m.secrets.change(key("a"), func(old *secretRecord) (*secretRecord, error) {
				<-gate
				return old, nil
			})
			done <- err
		}()
		synctest.Wait()
		if !m.secrets.mu.TryLock() {
			t.Fatal("whoever changes a secret keeps everybody from all")
		}
		m.secrets.mu.Unlock()
		if v, err := m.secretValue(sandbox.DefaultNamespace, sandbox.SecretRef{Secret: "a", Key: "K"}); v != "old" || err != nil {
			t.Errorf("%q, %v", v, err)
		}
		close(gate)
		must(t, <-done)
	})
}

func second2[A, B any](_ A, _ B, err error) error { return err }
