package node

import (
	"slices"
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/seal/sealtest"
	"agentrun.dev/internal/storage/snapshot"
)

// TestHolderCheckpoint: a checkpoint of a running or hibernated sandbox that
// holds secrets is sealed. Only the supplier of the secrets can make and restore
// it. The restored sandbox holds them, too.
func TestHolderCheckpoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 1)
		s := claimHolder(t, m, "a")
		if _, _, err := m.Checkpoint(as(t, "bob"), sandbox.CheckpointRequest{Key: key("theft"), Source: "a"}); !sandbox.HasCode(err, sandbox.CodeDenied) {
			t.Errorf("a checkpoint by bob: %v", err)
		}
		if _, err := m.CheckpointOf(t.Context(), key("theft")); !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Errorf("the checkpoint is there: %v", err)
		}
		if _, _, err := m.Checkpoint(as(t, "alice"), sandbox.CheckpointRequest{Key: key("awake"), Source: "a"}); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Hibernate(t.Context(), key("a")); err != nil {
			t.Fatal(err)
		}
		if _, _, err := m.Checkpoint(as(t, "alice"), sandbox.CheckpointRequest{Key: key("asleep"), Source: "a"}); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"awake", "asleep"} {
			c, err := m.CheckpointOf(t.Context(), key(name))
			if err != nil {
				t.Fatal(err)
			}
			if image, err := snapshot.ReadManifest(m.checkpointDir(c.ID)); err != nil || !image.Private {
				t.Errorf("checkpoint %s is private: %v, %v", name, image.Private, err)
			}
			if _, _, err := m.Restore(as(t, "bob"), sandbox.RestoreRequest{Key: key("stolen"), Checkpoint: sandbox.Name(name), Spec: sandbox.RestoreSpec{}}); !sandbox.HasCode(err, sandbox.CodeDenied) {
				t.Errorf("restored by bob: %v", err)
			}
			// With and without more environment.
			for i, spec := range []sandbox.RestoreSpec{{}, {Env: sandbox.Env{"MORE": "1"}}} {
				back, _, err := m.Restore(as(t, "alice"), sandbox.RestoreRequest{Key: key(name + string(rune('0'+i))), Checkpoint: sandbox.Name(name), Spec: spec})
				if err != nil || !slices.Equal(back.Secrets, s.Secrets) || back.SecretsBy != "alice" || back.Env["API_KEY"] != "" {
					t.Errorf("%+v, %v", back, err)
				}
			}
		}
		if found := sealtest.FilesWith(t, dir, canary); found != nil {
			t.Errorf("in the clear in %v", found)
		}
	})
}
