package helper

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// lockedEnv names a folder in which this program is to lock itself down and try
// calls.
const lockedEnv = "AGENTRUN_TEST_LOCKED"

func TestMain(m *testing.M) {
	if dir := os.Getenv(lockedEnv); dir != "" {
		if err := tryLocked(dir); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func TestLockDown(t *testing.T) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{lockedEnv + "=" + t.TempDir()}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// tryLocked tries calls that must fail, and calls that must not.
func tryLocked(dir string) error {
	victim := exec.Command("/bin/sleep", "1000")
	if err := victim.Start(); err != nil {
		return err
	}
	if err := lockDown(compile()); err != nil {
		return err
	}
	var errs []error
	for name, try := range map[string]func() error{
		"exec":        func() error { return unix.Exec("/bin/true", []string{"true"}, nil) },
		"fork":        func() error { return exec.Command("/bin/true").Run() },
		"internet":    func() error { return second(unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)) },
		"packets":     func() error { return second(unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)) },
		"trace":       func() error { return unix.PtraceAttach(victim.Process.Pid) },
		"mount":       func() error { return unix.Mount("none", dir, "tmpfs", 0, "") },
		"namespace":   func() error { return unix.Unshare(unix.CLONE_NEWNS) },
		"mode":        func() error { return unix.Chmod(dir, 0o4777) },
		"owner":       func() error { return unix.Chown(dir, 1, 1) },
		"other user":  func() error { return unix.Setuid(1) },
		"kernel keys": func() error { return second(unix.KeyctlGetKeyringID(unix.KEY_SPEC_SESSION_KEYRING, true)) },
		"code": func() error {
			return second(unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_EXEC, unix.MAP_ANON|unix.MAP_PRIVATE))
		},
	} {
		if err := try(); !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.ENOSYS) {
			errs = append(errs, fmt.Errorf("%s: %w, not %w", name, err, unix.EPERM))
		}
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err == nil {
		errs = append(errs, fmt.Errorf("a pair of sockets was made: %v", fds))
	}
	for name, try := range map[string]func() error{
		"write": func() error { return os.WriteFile(filepath.Join(dir, "file"), []byte("x"), 0o600) },
		"list":  func() error { return second(os.ReadDir(dir)) },
		"clean": func() error { return os.RemoveAll(filepath.Join(dir, "file")) },
		"kill":  victim.Process.Kill,
		"unix":  func() error { return second(unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)) },
	} {
		if err := try(); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
	}
	_ = victim.Wait() // it was killed
	statuses, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil {
		return err
	}
	for _, path := range statuses {
		b, _ := os.ReadFile(path) // a thread may have ended
		for _, want := range []string{"Seccomp:\t2", "NoNewPrivs:\t1", "CapEff:\t0000000000000020", "CapPrm:\t0000000000000020"} {
			if len(b) > 0 && !strings.Contains(string(b), want) {
				errs = append(errs, fmt.Errorf("%s lacks %q:\n%s", path, want, b))
			}
		}
	}
	return errors.Join(errs...)
}

func second[T any](_ T, err error) error { return err }
