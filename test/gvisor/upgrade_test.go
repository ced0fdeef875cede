package gvisor

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/enginetest"
	"agentrun.dev/internal/host/assets"
)

// TestUpgradedHelper: a sandbox goes on under its helper when AgentRun has another build
// of that. A fork of it, which only its own build could restore, is refused by name.
func TestUpgradedHelper(t *testing.T) {
	dir := t.TempDir()
	old := newEngine(t, config(enginetest.TempDir(t)))
	sb, err := old.Fork(t.Context(), freeze(t, boot(t, old)), engine.ForkOptions{Folder: dir})
	if err != nil {
		t.Fatal(err)
	}
	if err := sb.Detach(); err != nil {
		t.Fatal(err)
	}
	upgrade(t)
	e := newEngine(t, config(enginetest.TempDir(t)))
	if sb, err = e.Adopt(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	if err := sb.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := sb.Fork(t.Context(), []engine.ForkOptions{{}}); !errors.Is(err, engine.ErrMismatch) {
		t.Errorf("a fork: %v", err)
	}
	snap, err := sb.Snapshot(t.Context(), filepath.Join(t.TempDir(), "snapshot"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = snap.Close() }() // only read
	if err := old.Fits(snap.Manifest()); err != nil {
		t.Errorf("its snapshot is of its own helper: %v", err)
	}
	if err := e.Fits(snap.Manifest()); !errors.Is(err, engine.ErrMismatch) {
		t.Errorf("its snapshot is taken for the new one's: %v", err)
	}
}

// upgrade has engines that are opened from now on find another build of the helper: the
// same with another digest, as bytes after the end of a program are never read.
func upgrade(t *testing.T) {
	t.Helper()
	from, err := assets.Folder()
	if err != nil {
		t.Fatal(err)
	}
	to := t.TempDir()
	entries, err := os.ReadDir(from)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() != string(assets.GVisorHelper) {
			if err := os.Symlink(filepath.Join(from, e.Name()), filepath.Join(to, e.Name())); err != nil {
				t.Fatal(err)
			}
		}
	}
	program, err := os.ReadFile(filepath.Join(from, string(assets.GVisorHelper)))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(to, string(assets.GVisorHelper)), append(program, "another"...), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv(assets.EnvFolder, to)
}
