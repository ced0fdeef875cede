package procid

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// sleeper starts a process that sleeps until the test ends.
func sleeper(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may be dead already
		_ = cmd.Wait()
	})
	return cmd
}

func TestID(t *testing.T) {
	id, err := Of(sleeper(t).Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if !id.Alive() {
		t.Error("a running process is not alive")
	}
	// The same number with another start time is another process, which is
	// neither alive nor killed.
	other := ID{id.PID, id.Start + 1}
	if other.Alive() {
		t.Error("a process that never was is alive")
	}
	if err := other.Kill(t.Context()); err != nil || !id.Alive() {
		t.Errorf("killing one that never was: %v; the other is alive: %t", err, id.Alive())
	}
	if _, err := Adopt(other); !errors.Is(err, unix.ESRCH) {
		t.Errorf("adopting it: %v", err)
	}
	if err := id.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if id.Alive() {
		t.Error("a killed process is alive")
	}
	if err := id.Kill(t.Context()); err != nil {
		t.Errorf("killing it again: %v", err)
	}
}

// TestAdoptedEnds: Wait returns for an adopted process that has ended before,
// and for one that ends meanwhile.
func TestAdoptedEnds(t *testing.T) {
	for name, early := range map[string]bool{"already": true, "later": false} {
		t.Run(name, func(t *testing.T) {
			cmd := sleeper(t)
			id, err := Of(cmd.Process.Pid)
			if err != nil {
				t.Fatal(err)
			}
			a, err := Adopt(id)
			if err != nil {
				t.Fatal(err)
			}
			if early {
				if err := id.Kill(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			waited := make(chan error, 1)
			go func() { waited <- a.Wait() }()
			if !early {
				a.Kill()
			}
			if err := errors.Join(<-waited, a.Close()); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestOddNames(t *testing.T) {
	// A name with parentheses and spaces must not change the parsed start time.
	dir := t.TempDir()
	path := filepath.Join(dir, "a) S 1 (b")
	self, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(self, path); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	odd, err := Of(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	plain, err := Of(sleeper(t).Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if odd.Start == 0 || plain.Start < odd.Start || plain.Start > odd.Start+100*60 {
		t.Errorf("start times %d and %d", odd.Start, plain.Start)
	}
	if _, err := Of(0); err == nil {
		t.Error("process 0 was identified")
	}
}

// TestCPUTime: a busy process uses processor time, and the time of its ended
// children counts.
func TestCPUTime(t *testing.T) {
	before, err := CPUTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	work := exec.Command("sh", "-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done")
	if err := work.Run(); err != nil {
		t.Fatal(err)
	}
	used := work.ProcessState.UserTime() + work.ProcessState.SystemTime()
	after, err := CPUTime(os.Getpid())
	if err != nil || after-before < used/2 || used == 0 {
		t.Errorf("%v after %v, of which a child has taken %v: %v", after, before, used, err)
	}
	if _, err := CPUTime(-1); err == nil {
		t.Error("a process that never was has taken time")
	}
}
