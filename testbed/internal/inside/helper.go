package inside

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"agentrun.dev/testbed/internal/protocol"
)

// Exit codes of a command that did not run, as in env(1).
const (
	exitTestbed  = 125
	exitNoExec   = 126
	exitNotFound = 127
)

// sessionSpec is the description of a session that the server passes to the helper.
type sessionSpec struct {
	Start protocol.Start
	Port  string
}

// sessionMain is the first process of a session's PID namespace. When it ends, in
// whatever way, the kernel kills all remaining processes of the command, in any
// cgroup, mount namespace or process group.
func sessionMain() {
	code, err := runSession()
	if err != nil {
		fmt.Fprintf(os.Stderr, "testbed: %v\n", err)
	}
	os.Exit(code)
}

func runSession() (int, error) {
	var spec sessionSpec
	raw, err := io.ReadAll(io.NewSectionReader(os.NewFile(3, "spec"), 0, 2*protocol.MaxStart))
	if err != nil {
		return exitTestbed, err
	}
	unix.Close(3)
	if err := json.Unmarshal(raw, &spec); err != nil {
		return exitTestbed, fmt.Errorf("read the session's specification: %w", err)
	}
	if len(spec.Start.Argv) == 0 {
		return exitTestbed, errors.New("no command")
	}
	if err := enterRoot(spec.Port); err != nil {
		return exitTestbed, err
	}
	for _, limit := range []int{unix.RLIMIT_NOFILE, unix.RLIMIT_MEMLOCK} {
		v := syscall.Rlimit{Cur: 1 << 20, Max: 1 << 20}
		if limit == unix.RLIMIT_MEMLOCK {
			v.Cur, v.Max = unix.RLIM_INFINITY, unix.RLIM_INFINITY
		}
		if err := syscall.Setrlimit(limit, &v); err != nil {
			return exitTestbed, fmt.Errorf("raise limit %d: %w", limit, err)
		}
	}
	unix.Umask(0o022)
	return runCommand(spec.Start)
}

// enterRoot makes the host's files the root of this mount namespace.
//
// Every session mounts them anew: 9p with cache=loose and overlayfs cache names (also
// absent ones) for as long as they are mounted, and a program that was just built on
// the host must be the one that runs.
func enterRoot(port string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	const base = "/session"
	root := base + "/root"
	if err := mount("session", base, "tmpfs", 0, "size=75%,mode=0755"); err != nil {
		return err
	}
	if err := mountHost(HostTag+port, base+"/lower"); err != nil {
		return err
	}
	for _, dir := range []string{base + "/upper", base + "/work"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	data := fmt.Sprintf("lowerdir=%[1]s/lower,upperdir=%[1]s/upper,workdir=%[1]s/work,xino=off", base)
	if err := mount("overlay", root, "overlay", 0, data); err != nil {
		return err
	}
	results, err := os.ReadFile("/results.path")
	if err != nil {
		return err
	}
	binds := [][2]string{{"/dev", "/dev"}, {"/sys", "/sys"}, {"/run", "/run"}, {resultsMount, strings.TrimSpace(string(results))}}
	for _, b := range binds {
		if err := mount(b[0], filepath.Join(root, b[1]), "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return err
		}
	}
	if err := linkModules(root); err != nil {
		return err
	}
	// A new PID namespace needs its own view of processes.
	if err := mount("proc", root+"/proc", "proc", 0, ""); err != nil {
		return err
	}
	// This moves the mount, as switch_root does: chroot alone would forbid user
	// namespaces inside.
	if err := os.Chdir(root); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("enter the root: %w", err)
	}
	return os.Chdir("/")
}

// linkModules puts the kernel's modules where modprobe looks for them.
func linkModules(root string) error {
	b, err := os.ReadFile("/modules.path")
	if err != nil {
		return err
	}
	folder := strings.TrimSpace(string(b))
	err = os.Symlink(folder, filepath.Join(root, "lib/modules", filepath.Base(folder)))
	if errors.Is(err, os.ErrExist) {
		return nil // it is the host's own kernel
	}
	return err
}

// mountHost mounts the host's root. The previous session on this port is dead, but
// the kernel may still be removing its mount. There is no event for that, so
// mountHost tries again.
func mountHost(tag, target string) error {
	const options = "trans=virtio,version=9p2000.L,msize=512000,cache=loose"
	for wait := time.Millisecond; ; wait *= 2 {
		err := mount(tag, target, "9p", unix.MS_RDONLY, options)
		if err == nil || !errors.Is(err, unix.EBUSY) || wait > 2*time.Second {
			return err
		}
		time.Sleep(wait)
	}
}

// runCommand runs the command as a child, forwards signals to its group and
// reaps orphans, until it ends.
func runCommand(start protocol.Start) (int, error) {
	os.Clearenv()
	for _, kv := range append(start.Env, "AGENTRUN_TESTBED=1") {
		if k, v, ok := strings.Cut(kv, "="); ok {
			if err := os.Setenv(k, v); err != nil {
				return exitTestbed, fmt.Errorf("set variable %q: %w", k, err)
			}
		}
	}
	if err := os.Chdir(start.Workdir); err != nil {
		return exitTestbed, fmt.Errorf("enter the working folder (is it readable over 9p?): %w", err)
	}
	path, err := exec.LookPath(start.Argv[0])
	if errors.Is(err, os.ErrPermission) {
		return exitNoExec, err
	} else if err != nil && !errors.Is(err, exec.ErrDot) {
		return exitNotFound, err
	}

	signals := make(chan os.Signal, 16)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGQUIT, unix.SIGHUP, unix.SIGUSR1, unix.SIGUSR2)
	attr := &syscall.ProcAttr{
		Env:   os.Environ(),
		Files: []uintptr{0, 1, 2},
		Sys:   &syscall.SysProcAttr{Setsid: true, Setctty: start.TTY},
	}
	pid, err := syscall.ForkExec(path, start.Argv, attr)
	if err != nil {
		return exitNoExec, fmt.Errorf("run %s: %w", path, err)
	}
	go func() {
		for s := range signals {
			_ = unix.Kill(-pid, s.(unix.Signal))
		}
	}()
	for {
		var status unix.WaitStatus
		got, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return exitTestbed, fmt.Errorf("wait for %s: %w", path, err)
		case got == pid && status.Signaled():
			return 128 + int(status.Signal()), nil
		case got == pid && status.Exited():
			return status.ExitStatus(), nil
		}
	}
}
