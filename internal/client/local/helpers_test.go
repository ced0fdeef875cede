package local

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"agentrun.dev/internal/engine/microvm"
)

// TestEverySnapshot: everySnapshot finds all snapshots that may need a helper: snapshots,
// the sources of running sandboxes, and hibernated sandboxes.
func TestEverySnapshot(t *testing.T) {
	dir := t.TempDir()
	s, err := Open(dir, microvm.JailPolicy{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	var want []string
	for _, path := range []string{s.SnapshotFolder("a"), filepath.Join(s.machineDir("b", 3), "from"), s.asleepDir("c", 1)} {
		if err := os.MkdirAll(path, 0o700); err != nil {
			t.Fatal(err)
		}
		want = append(want, path)
	}
	got, err := s.everySnapshot()
	if slices.Sort(got); err != nil || !slices.Equal(got, slices.Sorted(slices.Values(want))) {
		t.Errorf("%q, want %q, %v", got, want, err)
	}
}
