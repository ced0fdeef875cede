package microvm

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
)

// TestAdoptedLimit: a limit of memory that a parent has raised which was killed before
// it lowered it is what it was for the next one.
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
	file := limitFile(t, pid)
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

// limitFile is the file with the limit of the cgroup that a process is in.
func limitFile(t *testing.T, pid int) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		for _, path := range []string{
			filepath.Join("/sys/fs/cgroup", fields[1], fields[2], "memory.limit_in_bytes"),
			filepath.Join("/sys/fs/cgroup", fields[2], "memory.max"),
		} {
			if _, err := os.Stat(path); err == nil {
				return path
			}
		}
	}
	t.Fatalf("process %d is in no group of memory: %s", pid, b)
	return ""
}
