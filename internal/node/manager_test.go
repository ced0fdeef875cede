package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

func key(name string) sandbox.Key {
	return sandbox.Key{Namespace: sandbox.DefaultNamespace, Name: sandbox.Name(name)}
}

func isID(id sandbox.ID) bool {
	_, err := sandbox.ParseID(string(id))
	return err == nil
}

// setUp applies a template and a pool, and waits until the pool is full.
func setUp(t *testing.T, m *Manager, replicas int) {
	t.Helper()
	if _, err := m.ApplyTemplate(t.Context(), key("python"), sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib}); err != nil {
		t.Fatal(err)
	}
	if _, err := m.ApplyPool(t.Context(), key("pool"), sandbox.PoolSpec{Template: "python", Replicas: replicas}); err != nil {
		t.Fatal(err)
	}
	if err := m.WaitPool(t.Context(), key("pool")); err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
	if _, st, err := m.Pool(t.Context(), key("pool")); err != nil || st != (sandbox.PoolStatus{Phase: sandbox.PhaseReady, Ready: replicas, Snapshots: replicas}) {
		t.Fatalf("pool: %+v, %v", st, err)
	}
}

func claim(t *testing.T, m *Manager, name string, l sandbox.Lifetime) sandbox.Sandbox {
	t.Helper()
	s, _, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key(name), Spec: sandbox.ClaimSpec{Pool: "pool", Lifetime: l, Env: sandbox.Env{"WHO": name}}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// memory returns the memory of a sandbox's machine.
func memory(t *testing.T, h *nodetest.Host, m *Manager, name string) map[string]string {
	t.Helper()
	s, err := m.Sandbox(t.Context(), key(name))
	if err != nil {
		t.Fatal(err)
	}
	held := h.Memory(m.machineDir(s.Machine))
	if held == nil {
		t.Fatalf("%s has no machine", name)
	}
	return held
}

func wantState(t *testing.T, m *Manager, name string, want sandbox.State) sandbox.Sandbox {
	t.Helper()
	s, err := m.Sandbox(t.Context(), key(name))
	if err != nil || s.State != want {
		t.Fatalf("%s is %q, not %q (%v)", name, s.State, want, err)
	}
	return s
}

// wantEnded looks into the history.
func wantEnded(t *testing.T, m *Manager, name string, want sandbox.Reason) {
	t.Helper()
	if _, err := m.Sandbox(t.Context(), key(name)); !sandbox.HasCode(err, sandbox.CodeEnded) || !strings.Contains(err.Error(), string(want)) {
		t.Errorf("%s: %v, want that it ended as %s", name, err, want)
	}
	all, err := m.Sandboxes(t.Context(), sandbox.SandboxesRequest{Namespace: sandbox.DefaultNamespace, Page: sandbox.Page{}, Ended: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		if s.Name == sandbox.Name(name) && s.Reason == want && !s.Ended.IsZero() {
			return
		}
	}
	t.Errorf("%s did not end as %s: %+v", name, want, all)
}

// TestLife: a claim takes a ready sandbox, which is replaced; it can be listed,
// paused, hibernated, woken by use and killed, and is remembered.
func TestLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		m := daemon(t, t.TempDir(), h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 2)
		s := claim(t, m, "a", sandbox.Lifetime{})
		if s.State != sandbox.Running || !isID(s.ID) || s.Env["WHO"] != "a" || s.Env["FROM"] != "image" || s.Workdir != sandbox.DefaultWorkdir {
			t.Errorf("claimed %+v", s)
		}
		if got := memory(t, h, m, "a"); got["hostname"] != "a" || got["image"] != "one" {
			t.Errorf("it holds %v", got)
		}
		synctest.Wait()
		if _, st, err := m.Pool(t.Context(), key("pool")); err != nil || st.Ready != 2 {
			t.Errorf("the pool was not filled again: %+v, %v", st, err)
		}
		if _, _, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key("a"), Spec: sandbox.ClaimSpec{Pool: "pool"}}); !sandbox.HasCode(err, sandbox.CodeExists) {
			t.Errorf("claimed twice: %v", err)
		}
		if _, _, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key("b"), Spec: sandbox.ClaimSpec{Pool: "nobody"}}); !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Errorf("claimed of no pool: %v", err)
		}
		memory(t, h, m, "a")["mine"] = "kept"
		for _, step := range []struct {
			do   func(context.Context, sandbox.Key, ...sandbox.Precondition) (sandbox.Sandbox, error)
			want sandbox.State
		}{
			{m.Pause, sandbox.Paused}, {m.Pause, sandbox.Paused}, {m.Resume, sandbox.Running}, {m.Resume, sandbox.Running},
			{m.Hibernate, sandbox.Hibernated}, {m.Hibernate, sandbox.Hibernated}, {m.Pause, sandbox.Hibernated}, {m.Resume, sandbox.Running},
			{m.Pause, sandbox.Paused}, {m.Hibernate, sandbox.Hibernated},
		} {
			if s, err := step.do(t.Context(), key("a")); err != nil || s.State != step.want {
				t.Fatalf("%q, %v, want %q", s.State, err, step.want)
			}
		}
		used := m.capacity.reserved()
		u, err := m.Use(t.Context(), key("a"))
		if err != nil {
			t.Fatal(err)
		}
		if m.capacity.reserved() != used+64*mib {
			t.Error("a hibernated sandbox has reserved memory")
		}
		if got := memory(t, h, m, "a"); got["mine"] != "kept" {
			t.Errorf("it woke up with %v", got)
		}
		u.Close()
		if _, err := m.Kill(t.Context(), key("a")); err != nil {
			t.Fatal(err)
		}
		wantEnded(t, m, "a", sandbox.ReasonKilled)
		if left, err := m.Sandboxes(t.Context(), sandbox.SandboxesRequest{Namespace: sandbox.DefaultNamespace, Page: sandbox.Page{}, Ended: false}); err != nil || len(left) != 0 {
			t.Errorf("left: %v, %v", left, err)
		}
		if err := m.DeletePool(t.Context(), key("pool")); err != nil {
			t.Fatal(err)
		}
		wantNothing(t, m, h)
	})
}

// wantNothing: no sandbox is there, and nothing of one.
func wantNothing(t *testing.T, m *Manager, h *nodetest.Host) {
	t.Helper()
	if n := m.capacity.reserved(); n != 0 {
		t.Errorf("%d bytes are still reserved", n)
	}
	if len(h.Folders()) != 0 {
		t.Errorf("left: %v", h.Folders())
	}
	for _, dir := range []string{machinesDir, imagesDir, checkpointsDir} {
		if left, err := filepath.Glob(filepath.Join(m.cfg.Dir, dir, "*")); err != nil || len(left) != 0 {
			t.Errorf("left: %v, %v", left, err)
		}
	}
}

// TestTimeouts: a timeout counts the time that a sandbox runs, an idle timeout
// the time without use, and both do their action.
func TestTimeouts(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		ctx := t.Context()
		after := func(d time.Duration) { time.Sleep(d); synctest.Wait() }
		claim(t, m, "killed", sandbox.Lifetime{Timeout: time.Minute})
		claim(t, m, "extended", sandbox.Lifetime{Timeout: time.Minute})
		claim(t, m, "paused", sandbox.Lifetime{Timeout: time.Minute, OnTimeout: sandbox.TimeoutPause})
		claim(t, m, "asleep", sandbox.Lifetime{IdleTimeout: time.Minute, OnTimeout: sandbox.TimeoutHibernate})
		claim(t, m, "busy", sandbox.Lifetime{IdleTimeout: time.Minute})
		claim(t, m, "still", sandbox.Lifetime{Timeout: time.Minute, IdleTimeout: 2 * time.Minute})
		u, err := m.Use(ctx, key("busy"))
		if err != nil {
			t.Fatal(err)
		}
		after(30 * time.Second)
		if _, err := m.Hibernate(ctx, key("still")); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Extend(ctx, key("extended"), time.Minute); err != nil {
			t.Fatal(err)
		}
		after(29 * time.Second)
		wantState(t, m, "killed", sandbox.Running)
		after(time.Second)
		wantEnded(t, m, "killed", sandbox.ReasonTimeout)
		wantState(t, m, "extended", sandbox.Running)
		wantState(t, m, "paused", sandbox.Paused)
		wantState(t, m, "asleep", sandbox.Hibernated)
		wantState(t, m, "busy", sandbox.Running)
		after(30 * time.Second)
		wantEnded(t, m, "extended", sandbox.ReasonTimeout)
		after(time.Hour)
		wantState(t, m, "busy", sandbox.Running)
		wantState(t, m, "still", sandbox.Hibernated)
		u.Close()
		after(time.Minute)
		wantEnded(t, m, "busy", sandbox.ReasonIdle)
		// A sandbox that was away for long has only the time that it had left.
		if _, err := m.Resume(ctx, key("still")); err != nil {
			t.Fatal(err)
		}
		after(29 * time.Second)
		wantState(t, m, "still", sandbox.Running)
		after(time.Second)
		wantEnded(t, m, "still", sandbox.ReasonTimeout)
		// A sandbox that its timeout has paused runs for the full time again.
		for range 2 {
			if _, err := m.Resume(ctx, key("paused")); err != nil {
				t.Fatal(err)
			}
			after(59 * time.Second)
			wantState(t, m, "paused", sandbox.Running)
			after(time.Second)
			wantState(t, m, "paused", sandbox.Paused)
		}
	})
}

// TestDeath: a sandbox that ends by itself is known to have, with the reason.
func TestDeath(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		for want, cause := range map[sandbox.Reason]error{
			sandbox.ReasonOutOfMemory: fmt.Errorf("%w: %w", engine.ErrEnded, engine.ErrOutOfMemory),
			sandbox.ReasonExited:      fmt.Errorf("%w: %w", engine.ErrEnded, engine.ErrPoweredOff),
			sandbox.ReasonCrashed:     engine.ErrEnded,
		} {
			name := strings.ReplaceAll(string(want), "_", "-")
			s := claim(t, m, name, sandbox.Lifetime{})
			h.End(m.machineDir(s.Machine), cause)
			synctest.Wait()
			wantEnded(t, m, name, want)
		}
		wantNothing(t, m, h)
	})
}

// TestWakeOnce: many that want a hibernated sandbox at once wake it once.
func TestWakeOnce(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		if _, err := m.Hibernate(t.Context(), key("a")); err != nil {
			t.Fatal(err)
		}
		var all sync.WaitGroup
		for range 20 {
			all.Go(func() {
				u, err := m.Use(t.Context(), key("a"))
				if err != nil {
					t.Error(err)
					return
				}
				u.Close()
			})
		}
		all.Wait()
		if len(h.Folders()) != 1 {
			t.Errorf("%d machines", len(h.Folders()))
		}
	})
}

// TestFork: children continue from their source, each with an outcome of its
// own, and know where they come from.
func TestFork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		m := daemon(t, t.TempDir(), h, func(c *Config) { c.Capacity = 5 * 64 * mib })
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		source := claim(t, m, "a", sandbox.Lifetime{Timeout: time.Hour})
		memory(t, h, m, "a")["x"] = "1"
		claim(t, m, "f-2", sandbox.Lifetime{}) // a child's name is taken
		f, _, err := m.Fork(t.Context(), sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 4}})
		if err != nil {
			t.Fatal(err)
		}
		if f.Phase != sandbox.PhaseFailed || f.Children[0].Problem != "" || f.Children[1].Problem == "" ||
			f.Children[2].Problem != "" || !strings.Contains(f.Children[3].Problem, "no room") {
			t.Errorf("%+v", f)
		}
		memory(t, h, m, "f-1")["x"] = "2"
		if memory(t, h, m, "a")["x"] != "1" || memory(t, h, m, "f-3")["x"] != "1" {
			t.Error("a child's memory is not its own")
		}
		child := wantState(t, m, "f-3", sandbox.Running)
		if child.Parent != source.ID || child.Fork != "f" || child.Env["WHO"] != "a" || child.Timeout != time.Hour {
			t.Errorf("%+v", child)
		}
		if _, _, err := m.Fork(t.Context(), sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}}); !sandbox.HasCode(err, sandbox.CodeExists) {
			t.Errorf("forked twice under one name: %v", err)
		}
		if _, _, err := m.Fork(t.Context(), sandbox.ForkRequest{Key: key("g"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}}); !sandbox.HasCode(err, sandbox.CodeCapacity) {
			t.Errorf("forked beyond the capacity: %v", err)
		}
		if _, err := m.ForkOf(t.Context(), key("g")); !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Errorf("a fork that never was: %v", err)
		}
		if _, err := m.Kill(t.Context(), key("f-2")); err != nil {
			t.Fatal(err)
		}
		// A fork of a child; its source wakes up for it.
		if _, err := m.Hibernate(t.Context(), key("f-1")); err != nil {
			t.Fatal(err)
		}
		if _, _, err := m.Fork(t.Context(), sandbox.ForkRequest{Key: key("g"), Spec: sandbox.ForkSpec{Source: "f-1", Replicas: 1}}); err != nil {
			t.Fatal(err)
		}
		if memory(t, h, m, "g-1")["x"] != "2" {
			t.Error("a grandchild is not its parent's")
		}
	})
}

// aheadHost is an engine that makes parts of forks ahead.
type aheadHost struct {
	*nodetest.Host
	mu   sync.Mutex           // protects kept
	kept map[*keptSpares]bool // true: not closed yet
}

type keptSpares struct {
	engine.Spares // the test does not ask for them
	of            *aheadHost
}

func (h *aheadHost) KeepSpares(*snapshot.Snapshot, int) (engine.Spares, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := &keptSpares{of: h}
	h.kept[s] = true
	return s, nil
}

func (s *keptSpares) Close() error {
	s.of.mu.Lock()
	defer s.of.mu.Unlock()
	s.of.kept[s] = false
	return nil
}

// TestPoolSpares: each revision that a pool serves has spares, and leaves none.
func TestPoolSpares(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &aheadHost{Host: nodetest.NewHost(t), kept: map[*keptSpares]bool{}}
		m := daemon(t, t.TempDir(), h.Host, func(c *Config) { c.Engine = h })
		defer func() { _ = m.Close() }()
		count := func() (open, all int) {
			h.mu.Lock()
			defer h.mu.Unlock()
			for _, is := range h.kept {
				if all++; is {
					open++
				}
			}
			return open, all
		}
		setUp(t, m, 1)
		if open, all := count(); open != 1 || all != 1 {
			t.Errorf("of a new pool: %d of %d spares", open, all)
		}
		if _, err := m.ApplyTemplate(t.Context(), key("python"), sandbox.TemplateSpec{Image: "two", MilliCPUs: 1000, Memory: 64 * mib}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if open, all := count(); open != 1 || all != 2 {
			t.Errorf("after a change: %d of %d spares", open, all)
		}
		if err := m.DeletePool(t.Context(), key("pool")); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if open, all := count(); open != 0 || all != 2 {
			t.Errorf("after the pool's end: %d of %d spares", open, all)
		}
	})
}

// TestRehearsal: a waiting sandbox has rehearsed the probable first work of its
// user. A sandbox that is made for a claim has not, because that would take
// longer.
func TestRehearsal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &builder{}
		m := daemon(t, t.TempDir(), nodetest.NewHost(t), func(c *Config) { c.Builder = b })
		defer func() { _ = m.Close() }()
		setUp(t, m, 2)
		if n := b.rehearsed.Load(); n != 2 {
			t.Errorf("%d of two have rehearsed", n)
		}
		if _, err := m.ApplyPool(t.Context(), key("pool"), sandbox.PoolSpec{Template: "python"}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		claim(t, m, "at-once", sandbox.Lifetime{})
		if n := b.rehearsed.Load(); n != 2 {
			t.Errorf("%d have rehearsed: one of them for a claim that waits", n)
		}
		b.unable = errors.New("the kernel is stuck")
		if _, err := m.ApplyPool(t.Context(), key("pool"), sandbox.PoolSpec{Template: "python", Replicas: 1}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if _, st, err := m.Pool(t.Context(), key("pool")); err != nil || st.Ready != 0 || !strings.Contains(st.Problem, "the kernel is stuck") {
			t.Errorf("%+v, %v", st, err)
		}
	})
}

// TestTemplateChange: a pool goes over to a new revision when that is built;
// until then it serves the old one; a build that fails is told.
func TestTemplateChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, b := nodetest.NewHost(t), &builder{}
		m := daemon(t, t.TempDir(), h, func(c *Config) { c.Builder = b })
		defer func() { _ = m.Close() }()
		setUp(t, m, 2)
		claim(t, m, "old", sandbox.Lifetime{})
		synctest.Wait()
		apply := func(image string) {
			t.Helper()
			if _, err := m.ApplyTemplate(t.Context(), key("python"), sandbox.TemplateSpec{Image: image, MilliCPUs: 1000, Memory: 64 * mib}); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		status := func() sandbox.PoolStatus {
			_, st, err := m.Pool(t.Context(), key("pool"))
			if err != nil {
				t.Fatal(err)
			}
			return st
		}
		b.gate = make(chan struct{})
		apply("two")
		if st := status(); st != (sandbox.PoolStatus{Phase: sandbox.PhaseBuilding, Ready: 2}) {
			t.Errorf("while the new revision is built: %+v", st)
		}
		claim(t, m, "between", sandbox.Lifetime{})
		close(b.gate)
		synctest.Wait()
		if st := status(); st != (sandbox.PoolStatus{Phase: sandbox.PhaseReady, Ready: 2, Snapshots: 2}) {
			t.Errorf("when it is built: %+v", st)
		}
		claim(t, m, "new", sandbox.Lifetime{})
		for name, image := range map[string]string{"old": "one", "between": "one", "new": "two"} {
			if got := memory(t, h, m, name)["image"]; got != image {
				t.Errorf("%s is of image %q, not %q", name, got, image)
			}
		}
		if left, err := filepath.Glob(filepath.Join(m.cfg.Dir, snapshotsDir, "*")); err != nil || len(left) != 1 {
			t.Errorf("snapshots: %v, %v", left, err)
		}
		b.fail = errors.New("command 1 exited with 1")
		apply("three")
		if st := status(); st.Phase == sandbox.PhaseReady || !strings.Contains(st.Problem, "exited with 1") || st.Snapshots != 0 {
			t.Errorf("when a build has failed: %+v", st)
		}
		b.fail = nil
		apply("three")
		if st := status(); st != (sandbox.PoolStatus{Phase: sandbox.PhaseReady, Ready: 2, Snapshots: 2}) {
			t.Errorf("when it was applied again: %+v", st)
		}
	})
}
