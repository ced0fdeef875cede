package enginetest

import (
	"errors"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/engine"
)

// liveFork forks a running sandbox. Every child must come up.
func liveFork(t *testing.T, sb engine.Sandbox, opts ...engine.ForkOptions) ([]engine.Sandbox, engine.LiveForkStats) {
	t.Helper()
	f, err := sb.Fork(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	for i, child := range f.Forks {
		if f.Errs[i] != nil {
			t.Fatalf("fork %d: %v", i, f.Errs[i])
		}
		t.Cleanup(func() { _ = child.Close() })
	}
	return f.Forks, f.Stats
}

// testLiveFork: children of a running sandbox continue from one instant of it. They
// have identities of their own, and can be forked and captured themselves. Neither
// they nor their source see each other's writes.
func (s *suite) testLiveFork(t *testing.T) {
	for name, source := range map[string]engine.Sandbox{"booted": s.booted, "forked": s.fork(t, s.warm, engine.ForkOptions{})} {
		t.Run(name, func(t *testing.T) { s.testLiveForkOf(t, source) })
	}
}

func (s *suite) testLiveForkOf(t *testing.T, source engine.Sandbox) {
	read := func(sb engine.Sandbox) string {
		script := "cat /state 2>/dev/null; "
		if s.ScratchDevice != "" {
			script += "dd if=" + s.ScratchDevice + " bs=512 skip=16 count=1 2>/dev/null | head -n1"
		}
		return sh(t, sb, script)
	}
	write := func(sb engine.Sandbox, what string) {
		script := "echo " + what + " > /state; "
		if s.ScratchDevice != "" {
			script += "echo " + what + " | dd of=" + s.ScratchDevice + " bs=512 seek=16 conv=fsync,sync 2>/dev/null"
		}
		sh(t, sb, script)
	}
	want := func(sb engine.Sandbox, what string) {
		t.Helper()
		both := what
		if s.ScratchDevice != "" {
			both += "\n" + what
		}
		if got := read(sb); got != both {
			t.Errorf("holds %q, not %q", got, both)
		}
	}
	before, err := source.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	write(source, "one")
	children, stats := liveFork(t, source, engine.ForkOptions{Hostname: "first"}, engine.ForkOptions{})
	if stats.Pause <= 0 || stats.Captured < stats.Pause || stats.Copied == 0 {
		t.Errorf("stats of a fork: %+v", stats)
	}
	if s.caps.CopiesInPause && stats.WhyCopiedInPause == "" {
		t.Error("memory was copied in the pause, and the fork does not say so")
	}
	if st, err := source.Stats(t.Context()); err != nil || st.LastFork != stats || st.Generation != before.Generation {
		t.Errorf("stats of the source: %+v, %v, the fork said %+v", st, err, stats)
	}
	write(source, "two")
	later, _ := liveFork(t, source, engine.ForkOptions{})
	write(source, "three")
	for _, c := range children {
		want(c, "one")
	}
	want(later[0], "two")
	want(source, "three")
	if name := sh(t, children[0], "hostname"); name != "first" {
		t.Errorf("host name %q", name)
	}
	if sh(t, children[0], "cat /etc/machine-id") == sh(t, children[1], "cat /etc/machine-id") {
		t.Error("two children have one machine id")
	}
	if st, err := later[0].Stats(t.Context()); err != nil || st.Generation != before.Generation+1 {
		t.Errorf("generation %d of a child, %d of its source (%v)", st.Generation, before.Generation, err)
	}
	// A process of the source goes on in the child.
	first := number(t, sh(t, later[0], askCounter))
	for now := first; now == first; {
		now = number(t, sh(t, later[0], askCounter))
	}

	// Children of children, from a live fork and from a snapshot.
	write(children[0], "child")
	grandchildren, _ := liveFork(t, children[0], engine.ForkOptions{})
	write(children[0], "older")
	want(grandchildren[0], "child")
	snap, err := children[0].Snapshot(t.Context(), filepath.Join(t.TempDir(), "child"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = snap.Close() })
	if err := snap.Verify(t.Context()); err != nil {
		t.Error(err)
	}
	want(s.fork(t, snap, engine.ForkOptions{}), "older")
	want(children[1], "one")

	// Closing a source does not end its children.
	if err := children[0].Close(); err != nil {
		t.Error(err)
	}
	want(grandchildren[0], "child")
	if _, err := children[0].Fork(t.Context(), []engine.ForkOptions{{}}); !errors.Is(err, engine.ErrEnded) {
		t.Errorf("fork of a closed sandbox: %v, not %v", err, engine.ErrEnded)
	}
	want(source, "three")
}
