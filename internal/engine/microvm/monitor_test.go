package microvm

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestOnlyTheMonitorIsSlow: the runtime's monitor of a vmm, its second thread,
// has a long timer slack from the start on, and the first thread and most others
// have the usual one; one that the monitor has made has the monitor's.
func TestOnlyTheMonitorIsSlow(t *testing.T) {
	p := startBare(t, openJail(t))
	paths, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", p.Pid()))
	if err != nil || len(paths) < 4 {
		t.Fatalf("%d threads, %v", len(paths), err)
	}
	var threads []int
	for _, path := range paths {
		tid, err := strconv.Atoi(filepath.Base(path))
		if err != nil {
			t.Fatal(err)
		}
		threads = append(threads, tid)
	}
	slices.Sort(threads) // a test that runs when ids wrap around may fail, once in four million
	var slack []string
	for _, tid := range threads {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/timerslack_ns", tid))
		if err != nil {
			t.Fatal(err)
		}
		slack = append(slack, strings.TrimSpace(string(b)))
	}
	const usual, slow = "50000", "10000000"
	others := 0
	for _, have := range slack[2:] {
		if have == usual {
			others++
		}
	}
	if slack[0] != usual || slack[1] != slow || 2*others <= len(slack[2:]) {
		t.Errorf("the threads' timer slack is %v, want %s for the second alone, and %s", slack, slow, usual)
	}
}
