package goruntime

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// tasks makes a folder as /proc/self/task with threads of these ids.
func tasks(t *testing.T, ids ...int) string {
	t.Helper()
	dir := t.TempDir()
	for _, id := range ids {
		if err := os.Mkdir(filepath.Join(dir, strconv.Itoa(id)), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestMonitorThread(t *testing.T) {
	self := os.Getpid()
	for name, c := range map[string]struct {
		ids  []int
		want int
	}{
		"the next":              {[]int{self, self + 1, self + 2, self + 9}, self + 1},
		"ids between are taken": {[]int{self, self + 100, self + 70}, self + 70},
		"wrapped around":        {[]int{self, self - 1, self - 3}, self - 3},
		"later ones wrapped":    {[]int{self - 3, self, self + 5}, self + 5},
	} {
		if got, err := monitorThread(tasks(t, c.ids...), self); err != nil || got != c.want {
			t.Errorf("%s: pid %d, got %d, %v; want %d", name, self, got, err, c.want)
		}
	}
}

func TestMonitorThreadErrors(t *testing.T) {
	if _, err := monitorThread(tasks(t, os.Getpid()), os.Getpid()); err == nil || !strings.Contains(err.Error(), "one thread") {
		t.Errorf("one thread: %v", err)
	}
	if _, err := monitorThread(filepath.Join(t.TempDir(), "none"), 1); !os.IsNotExist(err) {
		t.Errorf("no folder: %v", err)
	}
	dir := tasks(t, os.Getpid(), os.Getpid()+4)
	if err := os.Mkdir(filepath.Join(dir, "strange"), 0o700); err != nil {
		t.Fatal(err)
	}
	if got, err := monitorThread(dir, os.Getpid()); err != nil || got != os.Getpid()+4 {
		t.Errorf("a name that is no id: %d, %v", got, err)
	}
}

// TestSlowMonitor changes the test's own monitor and reads the slack back.
func TestSlowMonitor(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may set another thread's timer slack")
	}
	tid, err := monitorThread("/proc/self/task", os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	path := "/proc/" + strconv.Itoa(tid) + "/timerslack_ns"
	slack := func() string {
		t.Helper()
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(b))
	}
	before := slack()
	t.Cleanup(func() {
		if err := os.WriteFile(path, []byte(before), 0); err != nil {
			t.Error(err)
		}
	})
	if err := SlowMonitor(1234567 * time.Nanosecond); err != nil {
		t.Fatal(err)
	}
	if got := slack(); got != "1234567" {
		t.Errorf("the monitor's slack is %s ns, want 1234567", got)
	}
}
