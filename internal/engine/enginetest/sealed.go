package enginetest

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/storage/snapshot"
)

// canary is a secret that only sealed files may hold.
const canary = "sk-live-7Yc2-canary-of-the-engine-tests"

// filesWith lists the files below a folder that contain the canary in plain text.
func filesWith(t *testing.T, dir string) (found []string) {
	t.Helper()
	files := os.DirFS(dir)
	err := fs.WalkDir(files, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := fs.ReadFile(files, path)
		if bytes.Contains(b, []byte(canary)) {
			found = append(found, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// testSealed: a sandbox that holds a secret is written to disk sealed, and has the
// secret when it wakes up. The same holds after it was adopted, forked and hibernated
// again.
func (s *suite) testSealed(t *testing.T) {
	home := t.TempDir()
	capture := func(sb engine.Sandbox, name string, opts ...snapshot.Option) *snapshot.Snapshot {
		t.Helper()
		snap, err := sb.Snapshot(t.Context(), filepath.Join(home, name), opts...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = snap.Close() })
		return snap
	}
	machine := func(name string) string {
		t.Helper()
		dir := filepath.Join(home, name)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	check := func(sb engine.Sandbox, who string) {
		t.Helper()
		if got := sh(t, sb, "echo $API_KEY; cat /written; tr '\\0' '\\n' < /proc/$(cat /holder)/environ | grep -c API_KEY="); got != canary+"\n"+canary+"\n1" {
			t.Errorf("%s holds %q", who, got)
		}
		if s.ScratchDevice != "" {
			if got := sh(t, sb, "head -n1 "+s.ScratchDevice); got != canary {
				t.Errorf("the disk of %s holds %q", who, got)
			}
		}
	}
	first := machine("first")
	sb := s.fork(t, s.warm, engine.ForkOptions{Folder: first})
	if err := sb.Agent().SetEnv(t.Context(), guestrpc.SetEnvRequest{Env: []string{"PATH=/bin:/usr/bin:/sbin", "API_KEY=" + canary}}); err != nil {
		t.Fatal(err)
	}
	sh(t, sb, "echo $API_KEY > /written; sleep 100000 </dev/null >/dev/null 2>&1 & echo $! > /holder")
	if s.ScratchDevice != "" {
		sh(t, sb, "echo $API_KEY | dd of="+s.ScratchDevice+" bs=512 conv=fsync 2>/dev/null")
	}
	// An unsealed snapshot contains the canary; otherwise this test would prove
	// nothing.
	plain := capture(sb, "plain")
	if filesWith(t, home) == nil {
		t.Error("the canary is nowhere, though nothing was sealed")
	}
	if err := errors.Join(plain.Close(), snapshot.Remove(filepath.Join(home, "plain"))); err != nil {
		t.Fatal(err)
	}

	asleep := capture(sb, "asleep", snapshot.Sealed(s.Key))
	if err := s.Engine.Remove(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	// The engine does not keep the memory either: the snapshot has to be read and
	// unsealed.
	if err := s.Engine.Keep(nil, []string{filepath.Join(s.dir, "warm")}); err != nil {
		t.Fatal(err)
	}
	if err := asleep.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := snapshot.Open(filepath.Join(home, "asleep")); !errors.Is(err, snapshot.ErrPrivate) {
		t.Errorf("opened without a key: %v", err)
	}
	asleep, err := snapshot.Open(filepath.Join(home, "asleep"), snapshot.WithKey(s.Key))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = asleep.Close() })
	second := machine("second")
	sb = s.fork(t, asleep, engine.ForkOptions{Folder: second, KeepIdentity: true})
	check(sb, "what woke up")
	sb = s.leave(t, sb, second)
	resume(t, sb)
	check(sb, "what was adopted")
	if _, err := sb.Snapshot(t.Context(), filepath.Join(home, "leak")); !errors.Is(err, snapshot.ErrPrivate) {
		t.Errorf("a snapshot of it that is not sealed: %v", err)
	}
	childDir := machine("child")
	children, _ := liveFork(t, sb, engine.ForkOptions{Folder: childDir})
	check(children[0], "its fork")
	again := capture(children[0], "again", snapshot.Sealed(s.Key))
	check(s.fork(t, again, engine.ForkOptions{}), "a fork of its fork's image")
	if found := filesWith(t, home); found != nil {
		t.Errorf("in the clear in %v", found)
	}
	if err := errors.Join(asleep.Verify(t.Context()), again.Verify(t.Context())); err != nil {
		t.Error(err)
	}
	for _, dir := range []string{second, childDir} {
		if err := s.Engine.Remove(t.Context(), dir); err != nil {
			t.Error(err)
		}
	}
}
