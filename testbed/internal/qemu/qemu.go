// Package qemu is the host's side of the testbed. It runs a QEMU VM, emulated in
// software, whose emulated AMD-V gives the programs inside a real /dev/kvm.
//
// One VM belongs to one checkout of the repository and is shared by all its commands;
// its files (sockets, pid, console) are in one state folder.
package qemu

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"agentrun.dev/internal/host/assets"
	"golang.org/x/sys/unix"
)

// Ports is how many commands can run in the VM at once.
const Ports = 8

// ErrNotRunning means that the VM is not up.
var ErrNotRunning = errors.New("the testbed machine is not running")

// EnvMachine names the environment variable that chooses another VM of the
// same checkout, by any name.
const EnvMachine = "AGENTRUN_TESTBED_MACHINE"

// VM is the testbed of one checkout.
type VM struct {
	repo  string
	state string
}

// Open finds the VM of the checkout around folder (or around the running
// program). It does not start it.
func Open(folder string) (*VM, error) {
	repo, err := findRepo(folder)
	if err != nil {
		exe, exeErr := os.Executable()
		if exeErr != nil {
			return nil, err
		}
		if repo, exeErr = findRepo(filepath.Dir(exe)); exeErr != nil {
			return nil, err
		}
	}
	cache, err := assets.CacheFolder()
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256([]byte(repo + os.Getenv(EnvMachine)))
	m := &VM{repo: repo, state: filepath.Join(cache, "testbed", hex.EncodeToString(sum[:8]))}
	if err := os.MkdirAll(m.state, 0o700); err != nil {
		return nil, err
	}
	return m, nil
}

// State is the folder of the VM's sockets, pid file and console log.
func (m *VM) State() string { return m.state }

// Results is the folder that the VM can write to, at the same path.
func (m *VM) Results() string { return filepath.Join(m.repo, "build", "out") }

func (m *VM) file(name string) string { return filepath.Join(m.state, name) }

// name identifies our QEMU process in its command line.
func (m *VM) name() string {
	sum := sha256.Sum256([]byte(m.state))
	return "agentrun-testbed-" + hex.EncodeToString(sum[:8])
}

func findRepo(folder string) (string, error) {
	start, err := filepath.EvalSymlinks(folder)
	if err != nil {
		return "", err
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(mod), "module agentrun.dev\n") {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("%s is not in a checkout of AgentRun: run the testbed from one", folder)
		}
	}
}

// PID returns the id of the VM's process, or ErrNotRunning.
func (m *VM) PID() (int, error) {
	b, err := os.ReadFile(m.file("pid"))
	if errors.Is(err, os.ErrNotExist) {
		return 0, ErrNotRunning
	} else if err != nil {
		return 0, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || pid < 2 || !m.isOurs(pid) {
		return 0, ErrNotRunning
	}
	return pid, nil
}

// isOurs distinguishes our QEMU from a process that got the same number later.
func (m *VM) isOurs(pid int) bool {
	cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && strings.Contains(string(cmdline), "\x00"+m.name()+"\x00")
}

// Stop ends the VM: first by a request, then by force. It signals only the process
// that it has verified, through a pidfd, and so never a process with a reused number.
func (m *VM) Stop() error {
	unlock, err := m.lock()
	if err != nil {
		return err
	}
	defer unlock()
	pid, err := m.PID()
	if err != nil {
		return err
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return ErrNotRunning
	} else if err != nil {
		return fmt.Errorf("open process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	if !m.isOurs(pid) {
		return ErrNotRunning
	}
	steps := []struct {
		act  func() error
		wait time.Duration
	}{
		{m.requestPowerOff, 5 * time.Second},
		{func() error { return unix.PidfdSendSignal(fd, unix.SIGTERM, nil, 0) }, 5 * time.Second},
		{func() error { return unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) }, 10 * time.Second},
	}
	for _, s := range steps {
		if err := s.act(); err == nil && waitExit(fd, s.wait) {
			return os.RemoveAll(m.file("pid"))
		}
	}
	return fmt.Errorf("process %d (QEMU) does not end; see %s", pid, m.file("console.log"))
}

// waitExit waits for a process to end: a pidfd becomes readable then.
func waitExit(pidfd int, limit time.Duration) bool {
	deadline := time.Now().Add(limit)
	for {
		left := time.Until(deadline)
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, int(max(0, left.Milliseconds())))
		if n > 0 {
			return true
		}
		if !errors.Is(err, unix.EINTR) {
			return false
		}
	}
}

// lock serialises start and stop of this VM between processes.
func (m *VM) lock() (unlock func(), err error) {
	f, err := lockFile(m.file("lock"), unix.LOCK_EX)
	if err != nil {
		return nil, err
	}
	return func() { _ = f.Close() }, nil
}

func lockFile(path string, how int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err = unix.Flock(int(f.Fd()), how)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EINTR) {
			_ = f.Close() // only locked
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
	}
}

// ConsoleTail returns the last lines of the VM's console.
func (m *VM) ConsoleTail(lines int) string {
	f, err := os.Open(m.file("console.log"))
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	var last []string
	for s := bufio.NewScanner(f); s.Scan(); {
		if last = append(last, s.Text()); len(last) > lines {
			last = last[1:]
		}
	}
	return strings.Join(last, "\n")
}
