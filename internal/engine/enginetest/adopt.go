package enginetest

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/engine"
)

// folder makes the folder of a fork.
func folder(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "machine")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

// leave detaches from a sandbox and adopts it again.
func (s *suite) leave(t *testing.T, sb engine.Sandbox, dir string) engine.Sandbox {
	t.Helper()
	if err := sb.Detach(); err != nil {
		t.Fatal(err)
	}
	sb, err := s.Engine.Adopt(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	return sb
}

func resume(t *testing.T, sb engine.Sandbox) {
	t.Helper()
	if err := sb.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// testAdopt: a sandbox with a folder goes on after Detach. Whoever adopts it can do
// everything with it that its maker could.
func (s *suite) testAdopt(t *testing.T) {
	dir := folder(t)
	sb := s.fork(t, s.warm, engine.ForkOptions{Hostname: "kept", Folder: dir})
	count := number(t, sh(t, sb, askCounter))
	// Enough data to notice lost pages.
	sum := sh(t, sb, "head -c 3000000 /dev/urandom > /data; md5sum < /data")
	before, err := sb.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	sb = s.leave(t, sb, dir)
	if sb.Agent() != nil {
		t.Error("an adopted sandbox has a session though it may stand still")
	}
	resume(t, sb)
	if name := sh(t, sb, "hostname"); name != "kept" {
		t.Errorf("its host name is %q", name)
	}
	if now := number(t, sh(t, sb, askCounter)); now < count {
		t.Errorf("its process counts %d, after %d", now, count)
	}
	if st, err := sb.Stats(t.Context()); err != nil || st.Generation != before.Generation {
		t.Errorf("generation %d, not %d (%v)", st.Generation, before.Generation, err)
	}

	// A live fork of it that is left as well, and children of both after both were
	// left.
	childDir := folder(t)
	children, _ := liveFork(t, sb, engine.ForkOptions{Folder: childDir})
	child := s.leave(t, children[0], childDir)
	sb = s.leave(t, sb, dir)
	resume(t, child)
	resume(t, sb)
	sh(t, child, "echo child > /who")
	sh(t, sb, "echo source > /who")
	for who, parent := range map[string]engine.Sandbox{"child": child, "source": sb} {
		grandchildren, _ := liveFork(t, parent, engine.ForkOptions{Folder: folder(t)}, engine.ForkOptions{})
		for _, g := range grandchildren {
			if got := sh(t, g, "cat /who; md5sum < /data; cat /warm"); got != who+"\n"+sum+"\nwarmed up" {
				t.Errorf("a fork of the adopted %s holds %q", who, got)
			}
			if number(t, sh(t, g, askCounter)) < count {
				t.Errorf("a fork of the adopted %s has lost its process", who)
			}
			s.wantScratch(t, g)
		}
	}

	// Hibernation: an adopter captures the sandbox while it stands still.
	if err := child.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	child = s.leave(t, child, childDir)
	snap, err := child.Snapshot(t.Context(), filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = snap.Close() })
	if err := s.Engine.Remove(t.Context(), childDir); err != nil {
		t.Error(err)
	}
	<-child.Done()
	again := s.fork(t, snap, engine.ForkOptions{KeepIdentity: true})
	if got := sh(t, again, "cat /who; md5sum < /data"); got != "child\n"+sum {
		t.Errorf("what woke up holds %q", got)
	}
	s.wantScratch(t, again)
}

// wantScratch checks the data that the template has written to the scratch disk.
func (s *suite) wantScratch(t *testing.T, sb engine.Sandbox) {
	t.Helper()
	if s.ScratchDevice == "" {
		return
	}
	if got := sh(t, sb, "head -n1 "+s.ScratchDevice); got != "from the parent" {
		t.Errorf("its disk holds %q", got)
	}
}

// testAdoptRefuses: Adopt refuses a sandbox that was closed or removed. Remove may be
// repeated. A booted sandbox has no folder, so neither it nor its forks can be left.
func (s *suite) testAdoptRefuses(t *testing.T) {
	dir := folder(t)
	sb := s.fork(t, s.warm, engine.ForkOptions{Folder: dir})
	if err := sb.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Engine.Adopt(t.Context(), dir); !errors.Is(err, engine.ErrEnded) {
		t.Errorf("adopted a sandbox that was closed: %v", err)
	}
	for range 2 {
		if err := s.Engine.Remove(t.Context(), dir); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder is still there: %v", err)
	}
	if _, err := s.Engine.Adopt(t.Context(), dir); err == nil {
		t.Error("adopted a sandbox that was removed")
	}
	if err := s.booted.Detach(); err == nil {
		t.Error("let go of a sandbox that nobody could find again")
	}
	live, err := s.booted.Fork(t.Context(), []engine.ForkOptions{{Folder: folder(t)}})
	if err != nil || live.Errs[0] == nil {
		t.Errorf("a fork of a booted sandbox has a folder (%v)", err)
	}
}
