package agent

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestShutdownRefusesWhenNotPID1(t *testing.T) {
	ps := newProcesses(t, Config{Orphans: false})
	wantKind(t, Shutdown(ps, nil, PowerOff, 0), ErrPermission)
}

// TestShutdown shuts a PID namespace down. reboot(2) in there ends its PID 1
// with SIGINT for power-off and SIGHUP for restart (pid_namespaces(7)).
func TestShutdown(t *testing.T) {
	for action, want := range map[string]syscall.Signal{"poweroff": syscall.SIGINT, "reboot": syscall.SIGHUP} {
		disk := newImage(t, "mkfs.ext4", "-q", "-F")
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), helperMode+"=shutdown", "HELPER_ACTION="+action,
			"HELPER_DIR="+t.TempDir(), "HELPER_DISK="+attachLoop(t, disk))
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS}
		began := time.Now()
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != want {
			t.Fatalf("%s: %v: %s", action, err, out)
		}
		if d := time.Since(began); d > killWait {
			t.Errorf("%s took %v: it waited for the bound, not for the end", action, d)
		}
		// The obedient process wrote its farewell, which is on the disk.
		dump, err := exec.Command("debugfs", "-R", "cat /bye", disk).Output()
		if err != nil || string(dump) != "farewell\n" {
			t.Errorf("%s: farewell is %q, %v; %s", action, dump, err, out)
		}
		expectClean(t, disk)
	}
}

// helpShutdown is PID 1 of a namespace without any mount of the host, so that no
// mount of the host can be made read-only.
func helpShutdown() error {
	if os.Getpid() != 1 {
		return errors.New("not PID 1 of a namespace")
	}
	dir, disk := os.Getenv("HELPER_DIR"), os.Getenv("HELPER_DISK")
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		return err
	}
	for _, d := range []string{"/bin", "/proc", "/disk", "/old", "/with space"} {
		if err := os.Mkdir(dir+d, 0o755); err != nil {
			return err
		}
	}
	box, err := os.ReadFile("/usr/bin/busybox")
	if err != nil {
		return err
	}
	if err := os.WriteFile(dir+"/bin/busybox", box, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(disk, dir+"/disk", "ext4", 0, ""); err != nil {
		return err
	}
	if err := unix.PivotRoot(dir, dir+"/old"); err != nil {
		return err
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	if err := unix.Unmount("/old", unix.MNT_DETACH); err != nil {
		return err
	}
	for _, d := range []string{"/proc", "/with space"} {
		fs := map[string]string{"/proc": "proc"}[d]
		if err := unix.Mount("x", d, orDefault(fs, "tmpfs"), 0, ""); err != nil {
			return err
		}
	}
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Count(string(table), "\n") != 4 {
		return errors.New("unexpected mounts, not going on: " + string(table))
	}
	// Open for reading: the disk is busy, and can only be made read-only.
	if _, err := os.Open("/disk"); err != nil {
		return err
	}
	ps := NewProcesses(Config{Orphans: true, Log: func(m string) { os.Stderr.WriteString(m + "\n") }})
	box1 := []string{"/bin/busybox", "sh", "-c"}
	ready := func(script string) error {
		p, err := ps.Start(ExecSpec{Argv: append(box1, script)})
		if err != nil {
			return err
		}
		r, err := p.Stdout().Attach(0)
		if err != nil {
			return err
		}
		defer r.Close()
		_, err = r.Read(nil, make([]byte, 1))
		return err
	}
	if err := errors.Join(
		ready(`trap "echo farewell >/disk/bye; exit" TERM; echo r; while :; do /bin/busybox sleep 1000 & wait $!; done`),
		ready(`trap "" TERM; (while :; do /bin/busybox sleep 1000; done &) ; echo r; while :; do /bin/busybox sleep 1000; done`),
	); err != nil {
		return err
	}
	action := PowerOff
	if os.Getenv("HELPER_ACTION") == "reboot" {
		action = Reboot
	}
	return Shutdown(ps, &System{upper: -1}, action, 300*time.Millisecond)
}

func TestParseMountLine(t *testing.T) {
	m, ok := parseMountLine([]byte(`36 35 98:0 /mnt1 /with\040space rw,noatime master:1 - ext3 /dev/root rw,errors=continue`))
	if !ok || m != (mountLine{"/with space", "ext3", true}) {
		t.Errorf("%+v %v", m, ok)
	}
	m, ok = parseMountLine([]byte(`36 35 98:0 / /a\b\777 ro - tmpfs t ro`))
	if !ok || m.writable || m.fstype != "tmpfs" {
		t.Errorf("%+v %v", m, ok)
	}
	for _, bad := range []string{"", "- - - -", "1 2 3 4 5 6 7 8 9 10", strings.Repeat(" ", 40)} {
		if m, ok := parseMountLine([]byte(bad)); ok {
			t.Errorf("%q: %+v", bad, m)
		}
	}
}

// expectClean expects an ext4 image without a journal to replay.
func expectClean(t *testing.T, image string) {
	t.Helper()
	state, err := exec.Command("dumpe2fs", "-h", image).Output()
	if err != nil || !strings.Contains(string(state), "Filesystem state:         clean") || strings.Contains(string(state), "needs_recovery") {
		t.Errorf("%s is not clean: %v: %s", image, err, state)
	}
}

// newImage makes a filesystem image with a mkfs tool. The tool gets the file and then
// the extra arguments.
func newImage(t *testing.T, mkfs string, args ...string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "disk.img")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(16 << 20); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if out, err := exec.Command(mkfs, append(args, file)...).CombinedOutput(); err != nil {
		t.Fatalf("%s (install e2fsprogs): %v: %s", mkfs, err, out)
	}
	return file
}

func attachLoop(t *testing.T, file string) string {
	t.Helper()
	out, err := exec.Command("losetup", "-f", "--show", file).CombinedOutput()
	if err != nil {
		t.Fatalf("losetup (needs root and the loop driver): %v: %s", err, out)
	}
	dev := strings.TrimSpace(string(out))
	t.Cleanup(func() { exec.Command("losetup", "-d", dev).Run() })
	return dev
}
