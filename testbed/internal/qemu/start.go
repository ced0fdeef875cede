package qemu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"agentrun.dev/testbed/internal/inside"
)

// Config configures the VM.
type Config struct {
	MemoryMiB int // 0: 8 GiB, or half of the host's if that is less
	CPUs      int // 0: 1
	// Kernel is a folder with boot and lib/modules: / is the host's installed kernel.
	// If empty, the kernel that testbed/kernel has fetched is used, or else /.
	Kernel string
}

// startLimit is far above the 3 to 5 seconds a start takes, for busy hosts.
const startLimit = 3 * time.Minute

// Start starts the VM unless it is up, and returns when it answers.
func (m *VM) Start(ctx context.Context, cfg Config) (started bool, err error) {
	unlock, err := m.lock()
	if err != nil {
		return false, err
	}
	defer unlock()
	if _, err := m.PID(); err == nil {
		return false, nil
	} else if !errors.Is(err, ErrNotRunning) {
		return false, err
	}
	if err := m.launch(cfg); err != nil {
		return false, err
	}
	// The greeting waits in the port until the server inside answers it. If QEMU ends
	// before that, the socket closes.
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	c, err := m.dial(ctx, "control")
	if err != nil {
		return false, fmt.Errorf("the testbed machine did not come up: %w\nlast lines of %s:\n%s", err, m.file("console.log"), m.ConsoleTail(40))
	}
	return true, c.Close()
}

func (m *VM) launch(cfg Config) error {
	// The distribution's QEMU is not used, because its emulation of SVM is wrong
	// (testbed/qemu).
	qemu := filepath.Join(m.repo, "build", "qemu-system-x86_64")
	if _, err := os.Stat(qemu); err != nil {
		return fmt.Errorf("the testbed's QEMU is missing: run make testbed, which builds it once: %w", err)
	}
	if err := m.fillDefaults(&cfg); err != nil {
		return err
	}
	k, err := findKernel(cfg.Kernel)
	if err != nil {
		return err
	}
	if err := unpackKernel(k.image, m.file("vmlinux")); err != nil {
		return err
	}
	if err := os.MkdirAll(m.Results(), 0o755); err != nil {
		return err
	}
	if err := writeInitramfs(m.file("initramfs"), m.Results(), k); err != nil {
		return err
	}
	for _, stale := range []string{"pid", "console.log"} {
		if err := os.RemoveAll(m.file(stale)); err != nil {
			return err
		}
	}
	cmd := exec.Command(qemu, m.qemuArgs(cfg)...)
	// Sockets are named relative to this folder, because a socket's path has 107
	// bytes at most.
	cmd.Dir = m.state
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	var errs bytes.Buffer
	cmd.Stderr = &errs
	// -daemonize: returns when the sockets listen and the pid file is written.
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("start QEMU: %w\n%s", err, errs.Bytes())
	}
	return nil
}

// defaultCPUs is one. With two, about one boot in eighty of a guest with two
// processors still ends in a triple fault or hangs (testbed/README.md). With one, 112
// of 112 boots were good.
const defaultCPUs = 1

func (m *VM) fillDefaults(cfg *Config) error {
	if cfg.CPUs == 0 {
		cfg.CPUs = defaultCPUs
	}
	if cfg.MemoryMiB == 0 {
		var info unix.Sysinfo_t
		if err := unix.Sysinfo(&info); err != nil {
			return fmt.Errorf("sysinfo: %w", err)
		}
		half := info.Totalram * uint64(info.Unit) / 2 >> 20
		cfg.MemoryMiB = int(min(8<<10, half))
	}
	if cfg.Kernel == "" {
		cfg.Kernel = filepath.Join(m.repo, "build", "testbed-kernel")
		if _, err := os.Stat(cfg.Kernel); err != nil {
			cfg.Kernel = "/"
		}
	}
	return nil
}

// qemuArgs are QEMU's arguments. tsc=reliable is needed because on hpet KVM would
// have no master clock, a path that hardware does not take. mitigations=off and a
// large translation buffer are for speed only.
func (m *VM) qemuArgs(cfg Config) []string {
	// A comma ends an option's value unless doubled.
	results := strings.ReplaceAll(m.Results(), ",", ",,")
	args := []string{
		"-name", m.name(), "-L", "/usr/share/qemu", "-L", "/usr/share/seabios",
		"-M", "q35", "-accel", "tcg,thread=multi,tb-size=1024", "-cpu", "EPYC,+svm,+npt",
		"-smp", strconv.Itoa(cfg.CPUs), "-m", strconv.Itoa(cfg.MemoryMiB),
		"-no-user-config", "-nodefaults", "-display", "none", "-no-reboot",
		"-daemonize", "-pidfile", m.file("pid"),
		"-kernel", m.file("vmlinux"), "-initrd", m.file("initramfs"),
		"-append", "console=ttyS0 quiet panic=-1 tsc=reliable mitigations=off",
		"-serial", "file:console.log",
		// For a person who examines a VM that hangs: info registers.
		"-monitor", "unix:monitor.socket,server=on,wait=off",
		"-device", "virtio-serial-pci,max_ports=" + strconv.Itoa(Ports+2),
		"-fsdev", "local,id=results,path=" + results + ",security_model=none,multidevs=remap",
		"-device", "virtio-9p-pci,fsdev=results,mount_tag=" + inside.ResultsTag,
	}
	serial := func(name string) {
		args = append(args, "-chardev", "socket,id=c"+name+",path="+socketName(name)+",server=on,wait=off",
			"-device", "virtserialport,chardev=c"+name+",name="+inside.PortPrefix+name)
	}
	serial("control")
	for i := range Ports {
		n := strconv.Itoa(i)
		serial(n)
		args = append(args,
			"-fsdev", "local,id=host"+n+",path=/,security_model=none,readonly=on,multidevs=remap",
			"-device", "virtio-9p-pci,fsdev=host"+n+",mount_tag="+inside.HostTag+n)
	}
	return args
}

func socketName(port string) string { return "port-" + port + ".socket" }
