package microvm

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/enginetest"
)

// TestAdoptedLimit: if a parent was killed after it had raised a memory limit, the
// next parent sets the limit back to its old value.
func TestAdoptedLimit(t *testing.T) {
	e := newEngine(t)
	booted, err := e.Boot(t.Context(), engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = booted.Close() })
	snap, err := booted.Snapshot(t.Context(), filepath.Join(t.TempDir(), "snapshot"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = snap.Close() })
	dir := t.TempDir()
	sb, err := e.Fork(t.Context(), snap, engine.ForkOptions{Folder: dir})
	if err != nil {
		t.Fatal(err)
	}
	pid, _, err := e.Inspect(dir)
	if err != nil {
		t.Fatal(err)
	}
	file := enginetest.MemoryLimit(t, pid)
	read := func() string {
		t.Helper()
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(b))
	}
	want := read()
	bytes, err := strconv.ParseUint(want, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(strconv.FormatUint(2*bytes, 10)), 0); err != nil {
		t.Fatal(err)
	}
	if err := sb.Detach(); err != nil {
		t.Fatal(err)
	}
	if sb, err = e.Adopt(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	if got := read(); got != want {
		t.Errorf("the limit is %s, it was %s", got, want)
	}
}
