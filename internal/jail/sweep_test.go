package jail

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestSweepWaits: a process that ends lets go of its user id before it leaves its
// group. Whoever comes in between waits for it, and leaves nothing behind.
func TestSweepWaits(t *testing.T) {
	cfg := config(t)
	j := open(t, cfg)
	all, err := j.cells()
	if err != nil {
		t.Fatal(err)
	}
	uid := defaultFirstUID + 7
	group, err := (&Groups{hierarchy: all.groups}).Create(groupName(uid), roomy)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := group.Start(cmd); err != nil {
		t.Fatal(err)
	}
	path := all.uids.path(uid)
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	swept := make(chan error, 1)
	go func() { swept <- j.Sweep() }()
	for locked(t, path) == 0 && len(swept) == 0 {
		time.Sleep(time.Millisecond) // there is no event for it
	}
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if err := <-swept; err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); err == nil {
		t.Errorf("user id %d is left", uid)
	}
}

// locked counts who holds a file, as /proc/locks tells without touching it.
func locked(t *testing.T, path string) (holders int) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatalf("the sweeper did not wait: %v", err)
	}
	b, err := os.ReadFile("/proc/locks")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(b), ":"+strconv.FormatUint(st.Ino, 10)+" ")
}
