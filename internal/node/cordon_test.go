package node

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// cordoned asks the node for its cordon.
func cordoned(t *testing.T, m *Manager) *sandbox.Cordon {
	t.Helper()
	n, err := m.Node(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return n.Cordon
}

// ready is how many sandboxes wait in the pool.
func ready(t *testing.T, m *Manager) int {
	t.Helper()
	synctest.Wait()
	_, st, err := m.Pool(t.Context(), key("pool"))
	if err != nil {
		t.Fatal(err)
	}
	return st.Ready
}

// TestCordon: no sandboxes are made, nor by the next daemon; existing ones keep
// running.
func TestCordon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		setUp(t, m, 2)
		claim(t, m, "a", sandbox.Lifetime{})
		ctx := sandbox.WithPrincipal(t.Context(), "user:root")
		if _, err := m.Hibernate(t.Context(), key("a")); err != nil {
			t.Fatal(err)
		}
		refused := func(what string, err error) {
			t.Helper()
			if !sandbox.HasCode(err, sandbox.CodeCordoned) || !strings.Contains(err.Error(), "user:root") || !strings.Contains(err.Error(), "uncordon") {
				t.Errorf("%s: %v", what, err)
			}
		}
		check := func() {
			t.Helper()
			_, _, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key("b"), Spec: sandbox.ClaimSpec{Pool: "pool"}})
			refused("a claim", err)
			_, _, err = m.Fork(t.Context(), sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}})
			refused("a fork", err)
			works(t)(m.Resume(t.Context(), key("a"))) // it is no drain
			works(t)(m.Hibernate(t.Context(), key("a")))
		}
		if _, err := m.Cordon(ctx, false); err != nil {
			t.Fatal(err)
		}
		since := cordoned(t, m).Since
		time.Sleep(time.Hour)
		check()
		if n := ready(t, m); n != 2 {
			t.Errorf("%d wait", n)
		}
		if _, err := m.Cordon(ctx, false); err != nil || cordoned(t, m).Since != since {
			t.Errorf("asked for again it is %+v, %v", cordoned(t, m), err)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		m = daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		check()
		time.Sleep(time.Hour)
		if n := ready(t, m); n != 0 {
			t.Errorf("the pool of a cordoned node has %d", n)
		}
		if _, err := m.Uncordon(t.Context()); err != nil || cordoned(t, m) != nil {
			t.Errorf("%+v, %v", cordoned(t, m), err)
		}
		if n := ready(t, m); n != 2 {
			t.Errorf("after it %d wait", n)
		}
		claim(t, m, "b", sandbox.Lifetime{})
	})
}

// TestDrain: running sandboxes are hibernated, waiting ones in pools end, and no sandbox
// wakes up. Those that cannot be hibernated are named and tried again. The next daemon
// goes on with the drain.
func TestDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		setUp(t, m, 2)
		for _, name := range []string{"a", "b", "c"} {
			claim(t, m, name, sandbox.Lifetime{})
		}
		works(t)(m.Pause(t.Context(), key("c")))
		synctest.Wait()
		h.FailCapture(errors.New("the disk is on fire"))
		if _, err := m.Cordon(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if c := cordoned(t, m); c == nil || c.Left != 1 || len(c.Problems) != 1 || !strings.Contains(c.Problems[0].Problem, "on fire") {
			t.Errorf("%+v", c)
		}
		if n := ready(t, m); n != 0 {
			t.Errorf("%d wait", n)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		m = daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		time.Sleep(2 * drainAgain)
		if c := cordoned(t, m); c == nil || c.Left != 0 || len(c.Problems) != 0 {
			t.Errorf("%+v", c)
		}
		for _, name := range []string{"a", "b", "c"} {
			if s := works(t)(m.Sandbox(t.Context(), key(name))); s.State != sandbox.Hibernated {
				t.Errorf("%s is %s", name, s.State)
			}
		}
		if _, err := m.Use(t.Context(), key("a")); !sandbox.HasCode(err, sandbox.CodeCordoned) {
			t.Errorf("a use: %v", err)
		}
		if _, err := m.Uncordon(t.Context()); err != nil {
			t.Fatal(err)
		}
		works(t)(m.Resume(t.Context(), key("a")))
		if n := ready(t, m); n != 2 {
			t.Errorf("after it %d wait", n)
		}
	})
}

// TestDrainForgetsProblems: a sandbox that does not run any more, whatever has ended it, is no
// problem of a drain.
func TestDrainForgetsProblems(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		for _, name := range []string{"a", "b"} {
			claim(t, m, name, sandbox.Lifetime{})
			h.FailCapture(errors.New("the disk is on fire"))
			must(t, second(m.Cordon(t.Context(), true)))
			synctest.Wait()
			if c := cordoned(t, m); c == nil || len(c.Problems) != 1 {
				t.Fatalf("%+v", c)
			}
			switch name {
			case "a":
				must(t, second(m.Kill(t.Context(), key(name))))
			case "b":
				must(t, second(m.Hibernate(t.Context(), key(name))))
			}
			time.Sleep(drainAgain)
			synctest.Wait()
			if c := cordoned(t, m); c == nil || c.Left != 0 || len(c.Problems) != 0 {
				t.Errorf("%s: %+v", name, c)
			}
			must(t, second(m.Uncordon(t.Context())))
		}
	})
}

// TestDrainProblemsAreBounded: the node's status stays readable for any number of sandboxes
// that cannot be hibernated, and for any texts of their problems: a message has a bound.
func TestDrainProblemsAreBounded(t *testing.T) {
	c := &cordon{changed: make(chan struct{})}
	c.set(&sandbox.Cordon{Drain: true})
	for i := range 10_000 {
		c.blame(key(fmt.Sprintf("s-%05d", i)), strings.Repeat("ü", 4096))
	}
	shown := c.shown(10_000)
	total := 0
	for _, p := range shown.Problems {
		total += len(p.Problem)
		if !utf8.ValidString(p.Problem) {
			t.Fatal("it is no text")
		}
	}
	if len(shown.Problems) == 0 || total > 1<<20 || shown.Left != 10_000 || shown.Problems[0].Name != "s-00000" {
		t.Errorf("%d problems of %d bytes, %d left", len(shown.Problems), total, shown.Left)
	}
}

// TestNodeIsKnown: the node has a name that stays, the one that it is configured with, and
// tells what it is and has.
func TestNodeIsKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		setUp(t, m, 0)
		first, err := m.Node(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := sandbox.ParseName(first.ID); err != nil || first.Boot != "this" || first.State == "" || first.Engine != "fake" {
			t.Errorf("%+v, %v", first, err)
		}
		if len(first.Snapshots) != 1 || first.Snapshots[0].Template != key("python") || first.Snapshots[0].Image != "sha256:0" || len(first.Snapshots[0].Digest) < 64 {
			t.Errorf("%+v", first.Snapshots)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		for _, configured := range []string{"", "rack-7"} {
			m = daemon(t, dir, h, func(c *Config) { c.NodeID = configured })
			n, err := m.Node(t.Context())
			want := first.ID
			if configured != "" {
				want = configured
			}
			if err != nil || n.ID != want || n.State != first.State {
				t.Errorf("%s in state %s, not %s in %s, %v", n.ID, n.State, want, first.State, err)
			}
			if err := m.Close(); err != nil {
				t.Fatal(err)
			}
		}
		other := daemon(t, t.TempDir(), h)
		defer func() { _ = other.Close() }()
		if n, err := other.Node(t.Context()); err != nil || n.ID == first.ID || n.State == first.State {
			t.Errorf("another node is %+v, %v", n, err)
		}
	})
}
