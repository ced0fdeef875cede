package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/vmm/cpu"
	"agentrun.dev/internal/vmm/kvm"
)

func probeKVM() ([]string, error) {
	sys, err := kvm.Open()
	if err != nil {
		return nil, err
	}
	missing := cpu.MissingCapabilities(sys)
	return missing, sys.Close()
}

// Requests of linux/uapi/linux/userfaultfd.h.
const (
	userfaultfdNew = 0xaa00      // USERFAULTFD_IOC_NEW
	uffdioAPI      = 0xc018_aa3f // UFFDIO_API
	uffdAPIVersion = 0xaa
)

// uffdAPI is struct uffdio_api.
type uffdAPI struct{ api, features, ioctls uint64 }

// The kernel's ABI; a wrong size does not compile.
var _ [24]byte = [unsafe.Sizeof(uffdAPI{})]byte{}

// probeUserfaultfd uses the device if it may, otherwise the system call. Both
// must report faults inside the kernel, because KVM_RUN causes such faults: a
// descriptor for user-mode faults only would not be enough.
func probeUserfaultfd() (features uint64, err error) {
	fd, deviceErr := openUserfaultfd()
	if deviceErr != nil {
		r, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
		if errno != 0 {
			return 0, fmt.Errorf("%w; userfaultfd: %w", deviceErr, errno)
		}
		fd = int(r)
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	// A request without features returns those of the kernel.
	a := uffdAPI{api: uffdAPIVersion}
	// Invariant: a lives on this frame until the call returns.
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uffdioAPI, uintptr(unsafe.Pointer(&a))); errno != 0 {
		return 0, fmt.Errorf("ask for the features of userfaultfd: %w", errno)
	}
	return a.features, nil
}

func openUserfaultfd() (fd int, err error) {
	dev, err := unix.Open("/dev/userfaultfd", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open /dev/userfaultfd: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Close(dev)) }()
	r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(dev), userfaultfdNew, unix.O_CLOEXEC|unix.O_NONBLOCK)
	if errno != 0 {
		return 0, fmt.Errorf("make a userfaultfd: %w", errno)
	}
	return int(r), nil
}

// probeMemfd makes a file as the product does: a memfd that can no longer
// change.
func probeMemfd() (err error) {
	fd, err := unix.MemfdCreate("doctor", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return fmt.Errorf("memfd_create: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	const seals = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return fmt.Errorf("seal it: %w", err)
	}
	return nil
}

// probeDisk examines the nearest folder that exists, because the cache folder
// is made only when it is first needed.
func probeDisk(path string) (uint64, error) {
	f, err := openNearest(path)
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }() // only looked at
	var s unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &s); err != nil {
		return 0, fmt.Errorf("look at %s: %w", f.Name(), err)
	}
	return s.Bavail * uint64(s.Bsize), nil
}

// openNearest opens a folder, or its nearest parent that exists.
func openNearest(path string) (*os.File, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	for {
		f, err := os.OpenFile(path, unix.O_PATH|unix.O_CLOEXEC, 0)
		switch parent := filepath.Dir(path); {
		case err == nil:
			return f, nil
		case !errors.Is(err, fs.ErrNotExist) || parent == path:
			return nil, fmt.Errorf("look at %s: %w", path, err)
		default:
			path = parent
		}
	}
}

// probeDiskLimits makes an empty cgroup bound the disk below a folder, for a
// moment.
func probeDiskLimits(folder string) (string, error) {
	f, err := openNearest(folder)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }() // only looked at
	device, err := jail.DeviceOf(f)
	if err != nil {
		return "", err
	}
	j := jail.New(jail.Config{})
	return device.String(), errors.Join(j.CheckIO(device), j.Close())
}

func probeWritable(path string) bool { return unix.Access(path, unix.W_OK) == nil }

// probeJail makes a jail like that of a sandbox and removes it again.
func probeJail() error {
	path, err := assets.Path(assets.VMM)
	if err != nil {
		return err
	}
	j := jail.New(jail.Config{Program: path})
	return errors.Join(j.Check(), j.Close())
}
