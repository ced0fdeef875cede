package node

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// accident is a host as a daemon left it that was killed at some step.
type accident struct {
	doing     string
	dir       string
	processes map[string]map[string]string // their memory
	answered  map[string]string            // sandboxes that a client was told of, and their memory
	kept      map[string]string            // likewise for checkpoints
}

// TestKilled: the daemon is killed during any operation. The next one has every
// sandbox that a client was told of, with its memory, in a usable state. It
// lists no other sandboxes, and nothing else is left over.
func TestKilled(t *testing.T) {
	var accidents []accident
	pictures := t.TempDir()
	synctest.Test(t, func(t *testing.T) { accidents = killEverywhere(t, pictures) })
	t.Logf("%d accidents", len(accidents))
	if len(accidents) < 30 {
		t.Errorf("only %d accidents", len(accidents))
	}
	for i, a := range accidents {
		t.Run(fmt.Sprintf("%d-%s", i, a.doing), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { a.examine(t) })
		})
	}
}

// killEverywhere lives through everything and takes a picture at each step.
func killEverywhere(t *testing.T, pictures string) (all []accident) {
	dir, h := t.TempDir(), nodetest.NewHost(t)
	m := daemon(t, dir, h)
	defer func() { _ = m.Close() }()
	setUp(t, m, 0) // nothing happens in the background
	answered, kept := map[string]string{}, map[string]string{}
	doing := ""
	h.Step = func() {
		a := accident{doing: doing, dir: filepath.Join(pictures, fmt.Sprint(len(all))), processes: map[string]map[string]string{}, answered: maps.Clone(answered), kept: maps.Clone(kept)}
		copyState(t, dir, a.dir)
		for _, folder := range h.Folders() {
			rel, err := filepath.Rel(dir, folder)
			if err != nil {
				t.Fatal(err)
			}
			a.processes[rel] = maps.Clone(h.Memory(folder))
		}
		all = append(all, a)
	}
	// Its images are sealed, and only alice forks it.
	ctx := sandbox.WithPrincipal(context.Background(), "alice")
	if _, err := m.ApplySecret(ctx, key("llm"), sandbox.SecretData{"K": []byte(canary)}); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"claim", func() error {
			_, _, err := m.Claim(ctx, sandbox.ClaimRequest{Key: key("a"), Spec: sandbox.ClaimSpec{Pool: "pool", Secrets: []sandbox.SecretRef{{Secret: "llm", Key: "K"}}}})
			memory(t, h, m, "a")["mine"] = "a"
			answered["a"] = "a"
			return err
		}},
		{"pause", func() error { _, err := m.Pause(ctx, key("a")); return err }},
		{"hibernate", func() error { _, err := m.Hibernate(ctx, key("a")); return err }},
		{"resume", func() error { _, err := m.Resume(ctx, key("a")); return err }},
		{"hibernate again", func() error { _, err := m.Hibernate(ctx, key("a")); return err }},
		{"fork", func() error {
			f, _, err := m.Fork(ctx, sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 2}})
			for _, c := range f.Children {
				memory(t, h, m, string(c.Name))["mine"] = string(c.Name)
				answered[string(c.Name)] = string(c.Name)
			}
			return err
		}},
		{"checkpoint", func() error {
			_, _, err := m.Checkpoint(ctx, sandbox.CheckpointRequest{Key: key("c"), Source: "a"})
			kept["c"] = "a"
			memory(t, h, m, "a")["mine"] = "changed"
			answered["a"] = "changed"
			return err
		}},
		{"restore", func() error {
			_, _, err := m.Restore(ctx, sandbox.RestoreRequest{Key: key("r"), Checkpoint: "c", Spec: sandbox.RestoreSpec{}})
			answered["r"] = "a"
			return err
		}},
		{"checkpoint one that sleeps", func() error {
			if _, err := m.Hibernate(ctx, key("r")); err != nil {
				return err
			}
			_, _, err := m.Checkpoint(ctx, sandbox.CheckpointRequest{Key: key("d"), Source: "r"})
			kept["d"] = "a"
			return err
		}},
		{"hibernate a fork", func() error { _, err := m.Hibernate(ctx, key("f-1")); return err }},
		{"kill", func() error {
			delete(answered, "a") // whether it is still there is left open
			_, err := m.Kill(ctx, key("a"))
			return err
		}},
		{"kill a fork that sleeps", func() error {
			delete(answered, "f-1")
			_, err := m.Kill(ctx, key("f-1"))
			return err
		}},
	} {
		doing = step.name
		if err := step.do(); err != nil {
			t.Fatalf("%s: %v", doing, err)
		}
	}
	h.Step = nil
	return all
}

// examine starts a daemon after the accident.
func (a accident) examine(t *testing.T) {
	h := nodetest.NewHost(t)
	for rel, memory := range a.processes {
		h.Put(filepath.Join(a.dir, rel), memory)
	}
	m := daemon(t, a.dir, h)
	defer func() { _ = m.Close() }()
	synctest.Wait()
	listed, err := m.Sandboxes(t.Context(), sandbox.SandboxesRequest{Namespace: sandbox.DefaultNamespace, Page: sandbox.Page{}, Ended: false})
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]bool{}
	for _, s := range listed {
		there[string(s.Name)] = true
		if !s.HoldsSecrets() || s.SecretsBy != "alice" {
			t.Errorf("%s does not know any more whose secrets it holds: %+v", s.Name, s)
		}
		u, err := m.Use(t.Context(), s.Key)
		if err != nil {
			t.Errorf("%s is listed as %s and cannot be used: %v", s.Name, s.State, err)
			continue
		}
		if want, told := a.answered[string(s.Name)]; told && memory(t, h, m, string(s.Name))["mine"] != want {
			t.Errorf("%s holds %v", s.Name, memory(t, h, m, string(s.Name)))
		}
		u.Close()
	}
	for name := range a.answered {
		if !there[name] {
			t.Errorf("%s is lost", name)
		}
	}
	a.restoreAll(t, m, h)
	if len(h.Folders()) != len(listed) {
		t.Errorf("%d machines of %d sandboxes", len(h.Folders()), len(listed))
	}
	for _, s := range listed {
		if _, err := m.Kill(t.Context(), s.Key); err != nil {
			t.Error(err)
		}
	}
	wantNothing(t, m, h)
}

// restoreAll: every checkpoint that is listed can be restored, those that somebody
// was told of are listed, and each can be deleted.
func (a accident) restoreAll(t *testing.T, m *Manager, h *nodetest.Host) {
	t.Helper()
	list, err := m.Checkpoints(t.Context(), sandbox.DefaultNamespace, sandbox.Page{})
	if err != nil {
		t.Fatal(err)
	}
	wantFolders(t, m, checkpointsDir, len(list))
	there := map[string]bool{}
	for _, c := range list {
		there[string(c.Name)] = true
		name := "again-" + string(c.Name)
		if _, _, err := m.Restore(as(t, "alice"), sandbox.RestoreRequest{Key: key(name), Checkpoint: c.Name, Spec: sandbox.RestoreSpec{}}); err != nil {
			t.Errorf("%s is listed and cannot be restored: %v", c.Name, err)
			continue
		}
		if want, told := a.kept[string(c.Name)]; told && memory(t, h, m, name)["mine"] != want {
			t.Errorf("%s holds %v", c.Name, memory(t, h, m, name))
		}
		if _, err := m.Kill(t.Context(), key(name)); err != nil {
			t.Error(err)
		}
		if err := m.DeleteCheckpoint(t.Context(), c.Key); err != nil {
			t.Error(err)
		}
	}
	for name := range a.kept {
		if !there[name] {
			t.Errorf("checkpoint %s is lost", name)
		}
	}
}

// TestRestart: a daemon that goes and comes back finds everything; the host's
// restart ends what ran and spares what slept.
func TestRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		setUp(t, m, 1)
		claim(t, m, "runs", sandbox.Lifetime{})
		claim(t, m, "still", sandbox.Lifetime{})
		claim(t, m, "sleeps", sandbox.Lifetime{})
		if _, err := m.Pause(t.Context(), key("still")); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Hibernate(t.Context(), key("sleeps")); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		m = daemon(t, dir, h)
		synctest.Wait()
		wantState(t, m, "runs", sandbox.Running)
		wantState(t, m, "still", sandbox.Paused)
		wantState(t, m, "sleeps", sandbox.Hibernated)
		if _, st, err := m.Pool(t.Context(), key("pool")); err != nil || st.Ready != 1 {
			t.Errorf("pool: %+v, %v", st, err)
		}
		if want := uint64(3 * 64 * mib); m.capacity.reserved() != want {
			t.Errorf("%d bytes are reserved, not %d", m.capacity.reserved(), want)
		}
		if _, err := m.ApplyPool(t.Context(), key("pool"), sandbox.PoolSpec{Template: "python"}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		m.crash()
		for _, folder := range h.Folders() {
			h.End(folder, engine.ErrEnded)
		}
		m = daemon(t, dir, h, func(c *Config) { c.Boot = "next" })
		defer func() { _ = m.Close() }()
		wantEnded(t, m, "runs", sandbox.ReasonHostRestart)
		wantEnded(t, m, "still", sandbox.ReasonHostRestart)
		if _, err := m.Resume(t.Context(), key("sleeps")); err != nil {
			t.Error(err)
		}
		wantState(t, m, "sleeps", sandbox.Running)
	})
}
