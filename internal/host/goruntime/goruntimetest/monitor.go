// Package goruntimetest checks processes that package goruntime should have set
// up.
package goruntimetest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// OnlyMonitorIsSlow checks that the runtime's monitor of a process, its second thread, has
// a long timer slack from the start, and the first thread and most others have the usual
// one. A thread that the monitor has made has the monitor's slack.
func OnlyMonitorIsSlow(t *testing.T, pid int, slack time.Duration) {
	t.Helper()
	paths, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
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
	slices.Sort(threads) // if the ids wrap around just now, the test may fail, once in four million
	var all []string
	for _, tid := range threads {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/timerslack_ns", tid))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, strings.TrimSpace(string(b)))
	}
	const usual = "50000"
	slow := strconv.FormatInt(slack.Nanoseconds(), 10)
	others := 0
	for _, have := range all[2:] {
		if have == usual {
			others++
		}
	}
	if all[0] != usual || all[1] != slow || 2*others <= len(all[2:]) {
		t.Errorf("the threads' timer slack is %v, want %s for the second alone, and %s", all, slow, usual)
	}
}
