package goruntime

import (
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// inheritorCommand makes the test binary a process whose parent has called
// SlowMonitorOfChildren.
const inheritorCommand = "goruntime-inheritor"

// Like the init function of a program: it runs before the tests and before
// main.
func init() {
	if os.Getenv(inheritorCommand) == "" {
		return
	}
	OnlyMonitor()
	for _, e := range slacks() {
		os.Stdout.WriteString(e + "\n")
	}
	os.Exit(0)
}

// slacks lists the timer slack of this process's threads, the oldest first.
func slacks() (all []string) {
	entries, _ := os.ReadDir("/proc/self/task") // an empty list fails the test
	for _, e := range entries {
		b, _ := os.ReadFile("/proc/" + e.Name() + "/timerslack_ns")
		all = append(all, strings.TrimSpace(string(b)))
	}
	return all
}

// TestSlowMonitorOfChildren: in a process started by a thread with a slack, the monitor
// keeps the slack. The first thread and those made ahead do not.
func TestSlowMonitorOfChildren(t *testing.T) {
	runtime.LockOSThread() // never unlocked: the thread ends with the test
	const slack = 7 * time.Millisecond
	if err := SlowMonitorOfChildren(slack); err != nil {
		t.Fatal(err)
	}
	got, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
	if err != nil || int64(got) != slack.Nanoseconds() {
		t.Fatalf("the thread's slack is %d ns, %v", got, err)
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), inheritorCommand+"=1", "GOMAXPROCS=1")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	threads := strings.Fields(string(out))
	if len(threads) < 2+threadsAhead {
		t.Fatalf("%d threads, want the first, the monitor and %d: %q", len(threads), threadsAhead, out)
	}
	usual := strconv.FormatInt(usualSlack.Nanoseconds(), 10)
	others := 0
	for _, have := range threads[2:] {
		if have == usual {
			others++
		}
	}
	slow := strconv.FormatInt(slack.Nanoseconds(), 10)
	if threads[0] != usual || threads[1] != slow || others < threadsAhead {
		t.Errorf("the threads' slack is %v ns, want %s for the second, %s for the first and at least %d others", threads, slow, usual, threadsAhead)
	}
}
