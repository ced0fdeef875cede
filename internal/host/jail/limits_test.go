package jail

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/cgroups/v3"
)

// TestLimitsAreSet reads the limits back from the kernel, also after a change,
// and runs into the limit of threads. (TestOOM does the same for memory.)
func TestLimitsAreSet(t *testing.T) {
	cfg := config(t)
	j := open(t, cfg)
	p := start(t, j, Limits{Memory: 100 * mib, MilliCPUs: 1500, Threads: 12})
	read := func(file string) string {
		t.Helper()
		for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
			paths, err := filepath.Glob(filepath.Join(root, cfg.Cgroup, groupName(p.Cell.UID()), file))
			if err != nil {
				t.Fatal(err)
			}
			for _, path := range paths {
				b, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				return strings.TrimSpace(string(b))
			}
		}
		return ""
	}
	check := func(wanted map[string]string) {
		t.Helper()
		for file, want := range wanted {
			v2 := file == "memory.max" || file == "cpu.max" || file == "cpu.weight"
			if cgroups.Mode() == cgroups.Unified != v2 && file != "pids.max" {
				continue // a file of the other cgroup version
			}
			if got := read(file); got != want {
				t.Errorf("%s is %q, want %q", file, got, want)
			}
		}
	}
	check(map[string]string{
		"memory.max": "104857600", "memory.limit_in_bytes": "104857600",
		"cpu.max": "150000 100000", "cpu.cfs_quota_us": "150000",
		"cpu.weight": "100", "cpu.shares": "1024",
		"pids.max": "12",
	})
	if err := p.Cell.Limit(Limits{Memory: 50 * mib, MilliCPUs: 700, Threads: 12, Background: true}); err != nil {
		t.Fatal(err)
	}
	check(map[string]string{
		"memory.max": "52428800", "memory.limit_in_bytes": "52428800",
		"cpu.max": "70000 100000", "cpu.cfs_quota_us": "70000",
		"cpu.weight": "12", "cpu.shares": "122",
		"pids.max": "12",
	})
	if err := p.Cell.Limit(Limits{Memory: 50 * mib}); err == nil {
		t.Error("half a limit was accepted")
	}
	p.order(t, "threads", 0, 0)
	if said := p.answer(t); said != "" {
		t.Errorf("20 threads were made under a limit of 12: %s", said)
	}
	if status, _ := p.end(t, false); status.ExitStatus() != 2 || !strings.Contains(p.said(t), "failed to create new OS thread") {
		t.Errorf("it ended with %#x and said %q", status, p.said(t))
	}
}
