package jail

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// envNobody makes the test's binary try to make a jail and print the result.
const envNobody = "AGENTRUN_TEST_JAIL_AS_NOBODY"

func TestMain(m *testing.M) {
	if os.Getenv(envNobody) == "" {
		os.Exit(m.Run())
	}
	for _, allow := range []bool{false, true} {
		j := New(Config{Program: "/bin/true", AllowUnjailed: allow})
		fmt.Println(j.Check(), j.Sweep(), j.Close())
	}
}

// TestWithoutRoot: a jail without root is refused, and the error says the next
// step, unless AllowUnjailed is set.
func TestWithoutRoot(t *testing.T) {
	const nobody = 65534
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = self.Close() }()
	dir, err := os.MkdirTemp("", "agentrun-test-")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "test")
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(f, self); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path)
	cmd.Dir = dir
	cmd.Env = []string{envNobody + "=1"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	refused, accepted, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	if !strings.Contains(refused, "run as root") || !strings.Contains(refused, "--allow-unjailed") {
		t.Errorf("nobody was told %q", refused)
	}
	if accepted != "<nil> <nil> <nil>" {
		t.Errorf("nobody, with leave, was told %q", accepted)
	}
}

// TestUnjailed: without walls the filter still applies, and the process has no
// capabilities.
func TestUnjailed(t *testing.T) {
	cfg := config(t)
	j := open(t, cfg)
	j.thread = sync.OnceValues(func() (*thread, error) {
		j.mu.Lock()
		defer j.mu.Unlock()
		var err error
		j.inside, err = startThread(cfg.Program, cfg.Kind, false)
		return j.inside, err
	})
	p := start(t, j, roomy)
	p.order(t, "open", 0, 0)
	if status, _ := p.end(t, false); !status.Signaled() || status.Signal() != unix.SIGSYS {
		t.Errorf("opening a path ended it with %#x", status)
	}
	p = start(t, j, roomy)
	defer p.end(t, true)
	if p.Cell.UID() != 0 {
		t.Errorf("it has user id %d", p.Cell.UID())
	}
	p.order(t, "report and hold", 0, 0)
	if said := p.answer(t); said != `"locked down"` {
		t.Fatalf("it said %q", said)
	}
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", p.Pid))
	if err != nil || len(threads) == 0 {
		t.Fatal(threads, err)
	}
	for _, path := range threads {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"Seccomp:\t2", "NoNewPrivs:\t1", "CapPrm:\t0000000000000000", "CapEff:\t0000000000000000"} {
			if !strings.Contains(string(b), "\n"+want+"\n") {
				t.Errorf("%s has no %q:\n%s", path, want, b)
			}
		}
	}
}
