package microvm

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/vmmctl"
	"golang.org/x/sys/unix"
)

// sleeper is a process that somebody else looks after.
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

func TestProcessID(t *testing.T) {
	id, err := identify(sleeper(t).Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if !id.Alive() {
		t.Error("a running process is not alive")
	}
	// The same number with another start is another process: neither alive
	// nor killed.
	other := ProcessID{id.PID, id.Start + 1}
	if other.Alive() {
		t.Error("a process that never was is alive")
	}
	if err := other.Kill(t.Context()); err != nil || !id.Alive() {
		t.Errorf("killing one that never was: %v; the other is alive: %t", err, id.Alive())
	}
	if _, err := adopt(other); !errors.Is(err, unix.ESRCH) {
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

// TestAdoptedEnds: whoever adopts a process learns of its end, before and
// while it waits.
func TestAdoptedEnds(t *testing.T) {
	for name, early := range map[string]bool{"already": true, "later": false} {
		t.Run(name, func(t *testing.T) {
			cmd := sleeper(t)
			id, err := identify(cmd.Process.Pid)
			if err != nil {
				t.Fatal(err)
			}
			a, err := adopt(id)
			if err != nil {
				t.Fatal(err)
			}
			if early {
				if err := id.Kill(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			words := make(chan string, 1)
			go func() { words <- a.wait().text }()
			if !early {
				a.kill()
			}
			if said := <-words; said == "" {
				t.Error("no last words")
			}
		})
	}
}

func TestIdentifyNames(t *testing.T) {
	// A name with parentheses and spaces must not confuse the start time.
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
	odd, err := identify(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	plain, err := identify(sleeper(t).Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if odd.Start == 0 || plain.Start < odd.Start || plain.Start > odd.Start+100*60 {
		t.Errorf("start times %d and %d", odd.Start, plain.Start)
	}
	if _, err := identify(0); err == nil {
		t.Error("process 0 was identified")
	}
}

// TestStopListening: nobody there is fine; somebody there is told to stop.
func TestStopListening(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "control")
	if err := StopListening(t.Context(), path); err != nil {
		t.Errorf("no socket: %v", err)
	}
	listener, err := vmmctl.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	told := make(chan vmmctl.Message, 1)
	go func() {
		conn, err := vmmctl.Accept(listener)
		if err != nil {
			return
		}
		m, _, err := conn.Receive()
		if err == nil {
			told <- m
		}
		_ = conn.Close()
	}()
	if err := StopListening(t.Context(), path); err != nil {
		t.Error(err)
	}
	if m, ok := (<-told).(*vmmctl.Simple); !ok || m.Kind != vmmctl.KindStop {
		t.Errorf("it was told %#v", m)
	}
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	if err := StopListening(t.Context(), path); err != nil {
		t.Errorf("nobody listens: %v", err)
	}
	// One that does not stop is given up with the context.
	silent, err := vmmctl.Listen(filepath.Join(dir, "silent"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := StopListening(ctx, filepath.Join(dir, "silent")); err == nil {
		t.Error("one that says nothing was taken for stopped")
	}
}
