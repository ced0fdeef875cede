// Package inside is the part of the testbed that runs within the VM: PID 1, the
// server of the virtio-serial ports, and the helper that is the first process of
// every session. All three are the testbed's own binary, started as /init.
//
// PID 1 only mounts, loads modules and reaps; the server is its child, so that
// os/exec may wait for sessions without PID 1 taking their exit codes.
package inside

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// ModulesFile lists, in loading order, the modules in the initramfs.
	ModulesFile = "/modules.list"
	// ResultsTag is the mount tag of the writable share.
	ResultsTag = "results"
	// HostTag is the prefix of the mount tags of the host's root: one device
	// per port, since a 9p channel can be mounted only once at a time.
	HostTag = "host"
	// PortPrefix begins the names of the virtio-serial ports of sessions.
	PortPrefix = "testbed."
	// ControlPort is the port over which the VM is ended.
	ControlPort = "testbed.control"

	resultsMount = "/results"
	cgroupRoot   = "/sys/fs/cgroup"
)

// The roles of the binary inside the VM, as argv[0].
const (
	roleInit    = "/init"
	roleServer  = "testbed-server"
	roleSession = "testbed-session"
)

// Main runs a role of the VM and does not return, or returns at once when
// this process is an ordinary testbed command.
func Main() {
	switch os.Args[0] {
	case roleInit:
		if os.Getpid() == 1 {
			runInit()
		}
	case roleServer:
		fatal(serve())
	case roleSession:
		sessionMain()
	}
}

func runInit() {
	if err := prepare(); err != nil {
		fatal(err)
	}
	held, err := holdKVM()
	if err != nil {
		fatal(err)
	}
	defer runtime.KeepAlive(held)
	server := exec.Command("/proc/self/exe")
	server.Args = []string{roleServer}
	server.Stdout, server.Stderr = os.Stdout, os.Stderr
	if err := server.Start(); err != nil {
		fatal(fmt.Errorf("start the server: %w", err))
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if err == nil && pid == server.Process.Pid {
			fatal(fmt.Errorf("the server ended with %d (signal %v)", status.ExitStatus(), status.Signal()))
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			fatal(fmt.Errorf("wait for children: %w", err))
		}
	}
}

// prepare sets up the bare kernel for sessions.
func prepare() error {
	mounts := []struct{ source, target, kind, data string }{
		{"proc", "/proc", "proc", ""},
		{"sys", "/sys", "sysfs", ""},
		{"dev", "/dev", "devtmpfs", ""},
		{"devpts", "/dev/pts", "devpts", "mode=0620,ptmxmode=0666,gid=5"},
		{"shm", "/dev/shm", "tmpfs", "mode=1777"},
		{"mqueue", "/dev/mqueue", "mqueue", ""},
		{"run", "/run", "tmpfs", "mode=0755"},
		// The options that doctor recommends.
		{"cgroup2", cgroupRoot, "cgroup2", "nsdelegate,favordynmods"},
	}
	for _, m := range mounts {
		if err := mount(m.source, m.target, m.kind, 0, m.data); err != nil {
			return err
		}
	}
	for name, target := range map[string]string{"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"} {
		if err := os.Symlink(target, "/dev/"+name); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	if err := loadModules(); err != nil {
		return err
	}
	if _, err := os.Stat("/dev/kvm"); err != nil {
		return fmt.Errorf("kvm-amd is loaded but there is no /dev/kvm: %w", err)
	}
	// devtmpfs makes it 0600; on Debian udev opens it to a group.
	if err := os.Chmod("/dev/kvm", 0o666); err != nil {
		return err
	}
	if err := mount(ResultsTag, resultsMount, "9p", 0, "trans=virtio,version=9p2000.L,msize=512000,cache=mmap"); err != nil {
		return err
	}
	if err := loopbackUp(); err != nil {
		return err
	}
	if err := enableControllers(); err != nil {
		return err
	}
	return unix.Sethostname([]byte("testbed"))
}

func mount(source, target, kind string, flags uintptr, data string) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(source, target, kind, flags, data); err != nil {
		return fmt.Errorf("mount %s (%s) on %s: %w", source, kind, target, err)
	}
	return nil
}

func loadModules() error {
	list, err := os.ReadFile(ModulesFile)
	if err != nil {
		return err
	}
	for _, path := range strings.Fields(string(list)) {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		_ = f.Close() // only read from
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("load module %s: %w", filepath.Base(path), err)
		}
	}
	return nil
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("bring the loopback up: %w", err)
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := ioctlIfreq(fd, unix.SIOCSIFFLAGS, ifr); err != nil {
		return fmt.Errorf("bring the loopback up: %w", err)
	}
	return nil
}

// enableControllers enables every controller of the kernel for the children of the
// root cgroup, as systemd would.
func enableControllers() error {
	have, err := os.ReadFile(cgroupRoot + "/cgroup.controllers")
	if err != nil {
		return err
	}
	for _, c := range strings.Fields(string(have)) {
		if err := os.WriteFile(cgroupRoot+"/cgroup.subtree_control", []byte("+"+c), 0); err != nil {
			return fmt.Errorf("enable the cgroup controller %s: %w", c, err)
		}
	}
	return nil
}

// fatal reports on the console, which the host shows when the VM does not
// come up, and ends the VM.
func fatal(err error) {
	fmt.Fprintf(os.Stderr, "testbed machine: %v\n", err)
	if log, logErr := readKernelLog(); logErr == nil {
		fmt.Fprintf(os.Stderr, "testbed machine: the kernel's last messages:\n%s", log)
	}
	powerOff()
}

func readKernelLog() (string, error) {
	buf := make([]byte, 1<<20)
	const readAll = 3 // SYSLOG_ACTION_READ_ALL
	n, err := unix.Klogctl(readAll, buf)
	if err != nil {
		return "", err
	}
	lines := strings.SplitAfter(string(buf[:n]), "\n")
	return strings.Join(lines[max(0, len(lines)-30):], ""), nil
}

func powerOff() {
	unix.Sync()
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		fmt.Fprintf(os.Stderr, "testbed machine: power off: %v\n", err)
	}
	os.Exit(1)
}
