package cpio

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestArchive unpacks an archive with cpio(1).
func TestArchive(t *testing.T) {
	tool, err := exec.LookPath("cpio")
	if err != nil {
		t.Fatal("cpio is missing: apt-get install cpio")
	}
	var archive bytes.Buffer
	w := NewWriter(&archive)
	w.Folder("bin")
	w.File("bin/tool", 0o755, 5, strings.NewReader("hello"))
	w.File("empty", 0o600, 0, strings.NewReader(""))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), tool, "--extract", "--quiet", "--no-absolute-filenames")
	cmd.Dir, cmd.Stdin = dir, &archive
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cpio: %v\n%s", err, out)
	}
	got, err := os.ReadFile(filepath.Join(dir, "bin/tool"))
	if err != nil || string(got) != "hello" {
		t.Errorf("bin/tool has %q, %v", got, err)
	}
	for name, mode := range map[string]os.FileMode{"bin/tool": 0o755, "empty": 0o600} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v; want mode %v", name, info, err, mode)
		}
	}
}

func TestShortFile(t *testing.T) {
	w := NewWriter(&bytes.Buffer{})
	w.File("short", 0o644, 10, strings.NewReader("hello"))
	if err := w.Close(); err == nil {
		t.Error("a file shorter than announced was archived")
	}
}
