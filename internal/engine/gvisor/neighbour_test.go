package gvisor

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/host/procid"
	"agentrun.dev/internal/vmm/vmmctl"
)

// TestNeighbour: a helper that names another sandbox as its own gets neither that
// sandbox's group nor its folder. Otherwise the group's limit would be changed and
// the folder removed.
func TestNeighbour(t *testing.T) {
	groups, err := jail.OpenGroups()
	if err != nil {
		t.Skip(err)
	}
	_ = groups.Remove(groupName(hostileID)) // left by a test that was killed
	neighbour, err := groups.Create(groupName(hostileID), jail.Limits{Memory: 1 << 30, MilliCPUs: 1000, Threads: 100})
	if err != nil {
		t.Fatal(err)
	}
	living := exec.Command("sleep", "1h")
	if err := neighbour.Start(living); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = living.Process.Kill()
		_ = living.Wait() // it was killed
		if _, err := neighbour.Release(); err != nil {
			t.Error(err)
		}
	})
	dir := t.TempDir()
	e := &Engine{
		cfg:    Config{Resident: filepath.Join(dir, "resident"), RunDir: filepath.Join(dir, "run")},
		groups: func() (*jail.Groups, error) { return groups, nil },
	}
	if err := os.MkdirAll(e.runDirOf(hostileID), 0o700); err != nil {
		t.Fatal(err)
	}
	control := filepath.Join(dir, "control")
	listener, err := vmmctl.Listen(control)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env, cmd.ExtraFiles = append(os.Environ(), hostileEnv+"=a neighbour"), []*os.File{listener}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	}()
	id, err := procid.Of(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	p, err := e.attach(t.Context(), control, id)
	if err == nil {
		if err := p.group.Restore(64 << 20); err != nil { // as adopt does
			t.Error(err)
		}
		_ = p.Detach()
	}
	if !errors.Is(err, engine.ErrEnded) || !strings.Contains(err.Error(), "it has described what cannot be") {
		t.Errorf("it was believed: %v", err)
	}
	if _, limit, err := neighbour.Memory(); err != nil || limit != 1<<30 {
		t.Errorf("the neighbour's limit is %d MiB, not 1024, %v", limit>>20, err)
	}
	if _, err := os.Stat(e.runDirOf(hostileID)); err != nil {
		t.Error(err)
	}
}
