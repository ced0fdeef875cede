package jail

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

// score returns the oom_score_adj of a process.
func score(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid))
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestSandboxesGoFirst: when memory is short, the kernel ends a sandbox before
// the process that started it: in a jail, in a group and without limits.
func TestSandboxesGoFirst(t *testing.T) {
	own := score(t, os.Getpid())
	p := start(t, open(t, config(t)), roomy)
	defer p.end(t, true)
	if got := score(t, p.Pid); got != max(own, sandboxScore) {
		t.Errorf("a jailed process has score %d", got)
	}
	all, err := open(t, config(t)).cells()
	if err != nil {
		t.Fatal(err)
	}
	group, err := (&Groups{hierarchy: all.groups}).Create("test-scores", roomy)
	if err != nil {
		t.Fatal(err)
	}
	for name, g := range map[string]*Group{"in a group": group, "without": nil} {
		cmd := exec.Command("cat")
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := g.Start(cmd); err != nil {
			t.Fatal(err)
		}
		if got := score(t, cmd.Process.Pid); got != max(own, sandboxScore) {
			t.Errorf("%s: a process has score %d", name, got)
		}
		if err := in.Close(); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	}
	if _, err := group.Release(); err != nil {
		t.Error(err)
	}
	if now := score(t, os.Getpid()); now != own {
		t.Errorf("this process had score %d and has %d", own, now)
	}
}

// TestHigherScoreStays: a score that is already higher does not change.
func TestHigherScoreStays(t *testing.T) {
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", cmd.Process.Pid), []byte("900"), 0); err != nil {
		t.Fatal(err)
	}
	if err := yieldMemory(cmd.Process.Pid); err != nil {
		t.Error(err)
	}
	if got := score(t, cmd.Process.Pid); got != 900 {
		t.Errorf("the score is %d", got)
	}
	if err := in.Close(); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if err := yieldMemory(1 << 30); err == nil {
		t.Error("nobody has a score")
	}
}
