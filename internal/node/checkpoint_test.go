package node

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

func checkpoint(t *testing.T, m *Manager, name, source string) sandbox.CheckpointSize {
	t.Helper()
	c, _, err := m.Checkpoint(t.Context(), sandbox.CheckpointRequest{Key: key(name), Source: sandbox.Name(source)})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestCheckpoint: a checkpoint holds what its source was, whatever becomes of
// that, and any number of sandboxes can be made of it.
func TestCheckpoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		source := claim(t, m, "a", sandbox.Lifetime{Timeout: time.Hour})
		memory(t, h, m, "a")["x"] = "1"
		c := checkpoint(t, m, "before", "a")
		if c.Of.Name != "a" || c.Of.ID != source.ID || c.Of.Template != "python" || c.Of.Machine != "" ||
			!isID(c.ID) || c.Stored == 0 || c.Unshared != c.Stored {
			t.Errorf("%+v", c)
		}
		wantState(t, m, "a", sandbox.Running)
		memory(t, h, m, "a")["x"] = "2"
		if _, _, err := m.Checkpoint(t.Context(), sandbox.CheckpointRequest{Key: key("before"), Source: "a"}); !sandbox.HasCode(err, sandbox.CodeExists) {
			t.Errorf("two under one name: %v", err)
		}
		if _, _, err := m.Checkpoint(t.Context(), sandbox.CheckpointRequest{Key: key("other"), Source: "nobody"}); !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Errorf("of nobody: %v", err)
		}
		if _, err := m.Kill(t.Context(), key("a")); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(m.DeletePool(t.Context(), key("pool")), m.DeleteTemplate(t.Context(), key("python")), m.Close()); err != nil {
			t.Fatal(err)
		}
		m = daemon(t, dir, h, func(c *Config) { c.Capacity = 2 * 64 * mib })
		for _, name := range []string{"r", "s"} {
			got, _, err := m.Restore(t.Context(), sandbox.RestoreRequest{Key: key(name), Checkpoint: "before", Spec: sandbox.RestoreSpec{
				Env: sandbox.Env{"MORE": name}, Metadata: map[string]string{"for": name}, Lifetime: sandbox.Lifetime{IdleTimeout: time.Minute},
			}})
			if err != nil {
				t.Fatal(err)
			}
			if got.State != sandbox.Running || got.Parent != source.ID || got.Checkpoint != "before" || got.Fork != "" ||
				got.Env["WHO"] != "a" || got.Env["MORE"] != name || got.Metadata["for"] != name ||
				got.Timeout != 0 || got.IdleTimeout != time.Minute || got.Workdir != source.Workdir || got.Limits != source.Limits {
				t.Errorf("%+v", got)
			}
			if memory(t, h, m, name)["x"] != "1" {
				t.Errorf("%s holds %v", name, memory(t, h, m, name))
			}
			memory(t, h, m, name)["x"] = name
		}
		if _, _, err := m.Restore(t.Context(), sandbox.RestoreRequest{Key: key("t"), Checkpoint: "before", Spec: sandbox.RestoreSpec{}}); !sandbox.HasCode(err, sandbox.CodeCapacity) {
			t.Errorf("beyond the capacity: %v", err)
		}
		if _, _, err := m.Restore(t.Context(), sandbox.RestoreRequest{Key: key("r"), Checkpoint: "before", Spec: sandbox.RestoreSpec{}}); !sandbox.HasCode(err, sandbox.CodeExists) {
			t.Errorf("under a name that is taken: %v", err)
		}
		if _, _, err := m.Restore(t.Context(), sandbox.RestoreRequest{Key: key("t"), Checkpoint: "after", Spec: sandbox.RestoreSpec{}}); !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Errorf("from no checkpoint: %v", err)
		}
		if _, _, err := m.Restore(t.Context(), sandbox.RestoreRequest{Key: key("t"), Checkpoint: "before", Spec: sandbox.RestoreSpec{Env: sandbox.Env{"=": ""}}}); !sandbox.HasCode(err, sandbox.CodeInvalid) {
			t.Errorf("with no environment: %v", err)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		wantEnded(t, m, "r", sandbox.ReasonIdle)
		wantEnded(t, m, "s", sandbox.ReasonIdle)
		if err := m.DeleteCheckpoint(t.Context(), key("before")); err != nil {
			t.Fatal(err)
		}
		if err := m.DeleteCheckpoint(t.Context(), key("before")); !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Errorf("deleted twice: %v", err)
		}
		wantNothing(t, m, h)
	})
}

// TestCheckpointStill: one that stands still, in memory or on disk, is captured
// as it is and stays so.
func TestCheckpointStill(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		memory(t, h, m, "a")["x"] = "1"
		if _, err := m.Pause(t.Context(), key("a")); err != nil {
			t.Fatal(err)
		}
		checkpoint(t, m, "paused", "a")
		wantState(t, m, "a", sandbox.Paused)
		if _, err := m.Hibernate(t.Context(), key("a")); err != nil {
			t.Fatal(err)
		}
		asleep := checkpoint(t, m, "asleep", "a")
		wantState(t, m, "a", sandbox.Hibernated)
		if asleep.Unshared >= asleep.Stored {
			t.Errorf("it shares nothing with the image of its source: %+v", asleep)
		}
		if n := m.capacity.reserved(); n != 0 {
			t.Errorf("%d bytes are reserved", n)
		}
		list, err := m.Checkpoints(t.Context(), sandbox.DefaultNamespace, sandbox.Page{})
		if err != nil || len(list) != 2 || list[0].Name != "asleep" || list[1].Name != "paused" {
			t.Fatalf("%+v, %v", list, err)
		}
		if all, err := m.CheckpointBytes(); err != nil || all == 0 || all > list[0].Stored+list[1].Stored {
			t.Errorf("together %d bytes, %v", all, err)
		}
		if page, err := m.Checkpoints(t.Context(), sandbox.DefaultNamespace, sandbox.Page{After: "asleep", Limit: 1}); err != nil || len(page) != 1 || page[0].Name != "paused" {
			t.Errorf("%+v, %v", page, err)
		}
		if _, err := m.Kill(t.Context(), key("a")); err != nil {
			t.Fatal(err)
		}
		if alone, err := m.CheckpointOf(t.Context(), key("asleep")); err != nil || alone.Unshared != alone.Stored {
			t.Errorf("its source is gone, and it has %+v, %v", alone.Size, err)
		}
		for _, from := range []string{"paused", "asleep"} {
			if _, _, err := m.Restore(t.Context(), sandbox.RestoreRequest{Key: key("of-" + from), Checkpoint: sandbox.Name(from), Spec: sandbox.RestoreSpec{}}); err != nil {
				t.Fatal(err)
			}
			if memory(t, h, m, "of-"+from)["x"] != "1" {
				t.Errorf("%s holds %v", from, memory(t, h, m, "of-"+from))
			}
		}
		// A fork of a restored one was not restored itself.
		if _, _, err := m.Fork(t.Context(), sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "of-asleep", Replicas: 1}}); err != nil {
			t.Fatal(err)
		}
		if child := wantState(t, m, "f-1", sandbox.Running); child.Checkpoint != "" || child.Fork != "f" {
			t.Errorf("%+v", child)
		}
	})
}

// TestCheckpointInUse: while a sandbox is being made of a checkpoint that is not
// deleted, and while one is being written it is not to be seen.
func TestCheckpointInUse(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		var steps int
		h.Step = func() {
			steps++
			if list, err := m.Checkpoints(t.Context(), sandbox.DefaultNamespace, sandbox.Page{}); err != nil || len(list) != 0 {
				t.Errorf("half made: %+v, %v", list, err)
			}
			if _, err := m.CheckpointOf(t.Context(), key("c")); !sandbox.HasCode(err, sandbox.CodeNotFound) {
				t.Errorf("half made: %v", err)
			}
			if err := m.DeleteCheckpoint(t.Context(), key("c")); !sandbox.HasCode(err, sandbox.CodeNotFound) {
				t.Errorf("deleted while it is being made: %v", err)
			}
		}
		checkpoint(t, m, "c", "a")
		h.Step = func() {
			steps++
			if err := m.DeleteCheckpoint(t.Context(), key("c")); !sandbox.HasCode(err, sandbox.CodeConflict) || !strings.Contains(err.Error(), "being restored") {
				t.Errorf("deleted while it is used: %v", err)
			}
		}
		if _, _, err := m.Restore(t.Context(), sandbox.RestoreRequest{Key: key("r"), Checkpoint: "c", Spec: sandbox.RestoreSpec{}}); err != nil {
			t.Fatal(err)
		}
		h.Step = nil
		if steps < 4 {
			t.Errorf("looked %d times", steps)
		}
		if err := m.DeleteCheckpoint(t.Context(), key("c")); err != nil {
			t.Error(err)
		}
		if len(m.restoring) != 0 {
			t.Errorf("in use: %v", m.restoring)
		}
	})
}

// TestCheckpointFails: a failed checkpoint leaves nothing behind, and can be
// tried again.
func TestCheckpointFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		claim(t, m, "a", sandbox.Lifetime{})
		h.FailCapture(errors.New("no space left on device"))
		if _, _, err := m.Checkpoint(t.Context(), sandbox.CheckpointRequest{Key: key("c"), Source: "a"}); err == nil || !strings.Contains(err.Error(), "checkpoint sandbox a: no space left") {
			t.Errorf("a capture that fails: %v", err)
		}
		wantState(t, m, "a", sandbox.Running)
		wantFolders(t, m, checkpointsDir, 0)
		checkpoint(t, m, "c", "a")
		used := m.capacity.reserved()
		for _, cause := range []error{errors.New("no luck"), engine.ErrMismatch} {
			h.FailNext(cause)
			if _, _, err := m.Restore(t.Context(), sandbox.RestoreRequest{Key: key("r"), Checkpoint: "c", Spec: sandbox.RestoreSpec{}}); !errors.Is(err, cause) {
				t.Errorf("a restore that fails with %v: %v", cause, err)
			}
		}
		if m.capacity.reserved() != used {
			t.Error("a restore that failed has kept memory")
		}
		wantFolders(t, m, machinesDir, 1)
		if _, _, err := m.Restore(t.Context(), sandbox.RestoreRequest{Key: key("r"), Checkpoint: "c", Spec: sandbox.RestoreSpec{}}); err != nil {
			t.Error(err)
		}
		// A daemon that was killed when it had forgotten it, and not deleted it yet.
		if _, err := m.dropCheckpoint(key("c"), nil); err != nil {
			t.Fatal(err)
		}
		wantFolders(t, m, checkpointsDir, 1)
		m.crash()
		m = daemon(t, dir, h)
		wantFolders(t, m, checkpointsDir, 0)
	})
}

// wantFolders counts the entries of a folder in the state folder.
func wantFolders(t *testing.T, m *Manager, dir string, want int) {
	t.Helper()
	if left, err := filepath.Glob(filepath.Join(m.cfg.Dir, dir, "*")); err != nil || len(left) != want {
		t.Errorf("%d in %s, not %d: %v, %v", len(left), dir, want, left, err)
	}
}

// TestCheckpointOtherEngine: one that another engine has written is refused before
// anything is made.
func TestCheckpointOtherEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		setUp(t, m, 0)
		claim(t, m, "a", sandbox.Lifetime{})
		checkpoint(t, m, "c", "a")
		must(t, second(m.Kill(t.Context(), key("a"))))
		must(t, m.Close())
		m = daemon(t, dir, h, func(c *Config) { c.Engine = renamed{h} })
		defer func() { _ = m.Close() }()
		if _, _, err := m.Restore(t.Context(), sandbox.RestoreRequest{Key: key("r"), Checkpoint: "c", Spec: sandbox.RestoreSpec{}}); !sandbox.HasCode(err, sandbox.CodeConflict) || !strings.Contains(err.Error(), "other") {
			t.Errorf("%v", err)
		}
	})
}

// renamed is an engine by another name.
type renamed struct{ *nodetest.Host }

func (renamed) Name() string { return "other" }

// TestCheckpointOnce: a request that comes again gets what it got, and makes
// nothing, over a restart too.
func TestCheckpointOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		claim(t, m, "a", sandbox.Lifetime{})
		write, read := sandbox.NewOnce("me", "checkpoint", "k", []byte("body")), sandbox.NewOnce("me", "restore", "k", []byte("body"))
		c, replayed, err := m.Checkpoint(t.Context(), sandbox.CheckpointRequest{Key: key("c"), Source: "a", Once: &write})
		if err != nil || replayed {
			t.Fatalf("%v, replayed %v", err, replayed)
		}
		s, replayed, err := m.Restore(t.Context(), sandbox.RestoreRequest{Key: key("r"), Checkpoint: "c", Spec: sandbox.RestoreSpec{}, Once: &read})
		if err != nil || replayed {
			t.Fatalf("%v, replayed %v", err, replayed)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		m = daemon(t, dir, h)
		if again, replayed, err := m.Checkpoint(t.Context(), sandbox.CheckpointRequest{Key: key("d"), Source: "a", Once: &write}); err != nil || !replayed || again.ID != c.ID || again.Stored != c.Stored {
			t.Errorf("%+v, %v, replayed %v", again, err, replayed)
		}
		if again, replayed, err := m.Restore(t.Context(), sandbox.RestoreRequest{Key: key("q"), Checkpoint: "c", Spec: sandbox.RestoreSpec{}, Once: &read}); err != nil || !replayed || again.ID != s.ID {
			t.Errorf("%+v, %v, replayed %v", again, err, replayed)
		}
		if _, _, err := m.Checkpoint(t.Context(), sandbox.CheckpointRequest{Key: key("d"), Source: "a", Once: new(sandbox.NewOnce("me", "checkpoint", "k", []byte("other")))}); !sandbox.HasCode(err, sandbox.CodeConflict) {
			t.Errorf("another body: %v", err)
		}
		wantFolders(t, m, checkpointsDir, 1)
		wantFolders(t, m, machinesDir, 2)
	})
}
