package enginetest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/host/procid"
	"agentrun.dev/internal/storage/image"
)

// TempDir is a folder on tmpfs for all files of an engine. It is removed with the
// test.
func TempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "agentrun-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// MakeRoot makes an EROFS image of a busybox root in dir, and returns its path. The
// caller's package is two folders below the repository's root.
func MakeRoot(dir string) (string, error) {
	root, file := filepath.Join(dir, "root"), filepath.Join(dir, "root.erofs")
	ctx := context.Background()
	if out, err := exec.CommandContext(ctx, "../../guest/rootfs/busybox.sh", root).CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return file, image.FromDir(ctx, root, file)
}

// MemoryLimit is the file that holds the memory limit of a process's cgroup.
func MemoryLimit(t testing.TB, pid int) string {
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

// Hold opens processes that are not children of the test, so that the test can wait
// for their end.
func Hold(t testing.TB, pids []int) (held []*procid.Handle) {
	t.Helper()
	for _, pid := range pids {
		id, err := procid.Of(pid)
		if err != nil {
			t.Fatal(err)
		}
		h, err := procid.Adopt(id)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, h)
	}
	return held
}
