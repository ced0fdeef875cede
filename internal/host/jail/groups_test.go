package jail

import (
	"bufio"
	"errors"
	"io/fs"
	"os/exec"
	"strings"
	"testing"
)

// TestGroups: a child of a program in a group is in the group, too. It is
// killed for want of memory, and counted. Afterwards the group is removed.
func TestGroups(t *testing.T) {
	groups, err := OpenGroups()
	if err != nil {
		t.Fatal(err)
	}
	const name = "test-groups"
	if err := groups.Remove(name); err != nil {
		t.Fatal(err)
	}
	g, err := groups.Create(name, Limits{Memory: 64 << 20, MilliCPUs: 1000, Threads: 64})
	if err != nil {
		t.Fatal(err)
	}
	// The child allocates only when it is told to: on cgroups v1 it is moved into
	// the group after its start.
	cmd := exec.Command("sh", "-c", `read go; sh -c 's=0123456789abcdef; while :; do s=$s$s; done'; echo ended $?`)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Start(cmd); err != nil {
		t.Fatal(err)
	}
	back, err := g.Extend(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	if _, limit, err := g.Memory(); err != nil || limit != 65<<20 {
		t.Errorf("the limit is %d, %v", limit, err)
	}
	if err := back(); err != nil {
		t.Error(err)
	}
	if _, err := in.Write([]byte("\n")); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	if !lines.Scan() || !strings.HasPrefix(lines.Text(), "ended ") || lines.Text() == "ended 0" {
		t.Errorf("it said %q", lines.Text())
	}
	_ = cmd.Wait() // its exit code does not matter
	found, err := groups.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	if kills, err := found.Release(); err != nil || kills == 0 {
		t.Errorf("%d were killed, %v", kills, err)
	}
	if _, err := groups.Open(name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the group is there after its release: %v", err)
	}
	var none *Group
	if kills, err := none.Release(); kills != 0 || err != nil {
		t.Errorf("no group: %d, %v", kills, err)
	}
}
