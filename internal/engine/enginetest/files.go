package enginetest

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/engine"
)

// testFiles: an attached file is a disk of the sandbox, and such a sandbox cannot be
// captured. An engine without disks refuses files with ErrNoDisks.
func (s *suite) testFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, bytes.Repeat([]byte("attached"), 512), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	spec := s.Spec
	spec.Scratch, spec.Files = 0, []engine.FileDisk{{File: f, ReadOnly: true, ID: "file"}}
	sb, err := s.Engine.Boot(t.Context(), spec)
	if !s.caps.Disks {
		if !errors.Is(err, engine.ErrNoDisks) {
			t.Errorf("an engine without disks got a file as one: %v, want %v", err, engine.ErrNoDisks)
		}
		if err == nil {
			_ = sb.Close()
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sb.Close() }()
	if got := sh(t, sb, "head -c 8 "+s.ScratchDevice); got != "attached" {
		t.Errorf("the disk holds %q", got)
	}
	if _, err := sb.Snapshot(t.Context(), filepath.Join(s.dir, "files")); !errors.Is(err, engine.ErrFiles) {
		t.Errorf("a snapshot: %v, want %v", err, engine.ErrFiles)
	}
	if _, err := sb.Fork(t.Context(), []engine.ForkOptions{{}}); !errors.Is(err, engine.ErrFiles) {
		t.Errorf("a fork: %v, want %v", err, engine.ErrFiles)
	}
}
