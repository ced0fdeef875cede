package gvisor

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/enginetest"
	"agentrun.dev/internal/engine/gvisor"
)

// descendants lists a process and all processes below it.
func descendants(t *testing.T, pid string) []string {
	t.Helper()
	all := []string{pid}
	threads, err := filepath.Glob("/proc/" + pid + "/task/*/children")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range threads {
		b, _ := os.ReadFile(path) // a thread may have ended
		for child := range strings.FieldsSeq(string(b)) {
			all = append(all, descendants(t, child)...)
		}
	}
	return all
}

// TestProcessLimits: when memory is short, the helper, kernel and gofer of a
// sandbox, and of a fork that was made ahead, are killed before the host's
// processes. They can open as many files as they need.
func TestProcessLimits(t *testing.T) {
	cfg := config(enginetest.TempDir(t))
	cfg.Precreate = 1
	e := newEngine(t, cfg)
	sb, err := e.Boot(t.Context(), spec(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	snap := freeze(t, sb)
	boxes := []engine.Sandbox{sb}
	for range 2 { // the second was made ahead
		fork, err := e.Fork(t.Context(), snap, engine.ForkOptions{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = fork.Close() })
		boxes = append(boxes, fork)
		if err := e.Precreated(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for _, box := range boxes {
		id, err := gvisor.Identify(box)
		if err != nil {
			t.Fatal(err)
		}
		pids := descendants(t, strconv.Itoa(id.PID))
		if len(pids) < 3 {
			t.Errorf("helper, kernel and gofer are processes %q", pids)
		}
		for _, pid := range pids {
			score, err := os.ReadFile("/proc/" + pid + "/oom_score_adj")
			n, convErr := strconv.Atoi(strings.TrimSpace(string(score)))
			if err != nil || convErr != nil || n < 500 {
				t.Errorf("process %s has oom_score_adj %q, %v", pid, score, err)
			}
			b, err := os.ReadFile("/proc/" + pid + "/limits")
			if err != nil {
				t.Fatal(err)
			}
			var files int
			for line := range strings.Lines(string(b)) {
				_, _ = fmt.Sscanf(line, "Max open files %d", &files) // other lines do not match
			}
			if files == 0 || files > 4096 {
				t.Errorf("process %s can have %d open files", pid, files)
			}
		}
	}
}
