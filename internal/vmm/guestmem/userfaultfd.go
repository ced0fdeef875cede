package guestmem

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Requests of linux/uapi/linux/userfaultfd.h.
const (
	userfaultfdNew     = 0xaa00      // USERFAULTFD_IOC_NEW
	uffdioAPI          = 0xc018_aa3f // UFFDIO_API
	uffdioRegister     = 0xc020_aa00 // UFFDIO_REGISTER
	uffdioWake         = 0x8010_aa02 // UFFDIO_WAKE
	uffdioWriteProtect = 0xc018_aa06 // UFFDIO_WRITEPROTECT

	uffdAPIVersion      = 0xaa
	uffdFeatureWP       = 1 << 0  // UFFD_FEATURE_PAGEFAULT_FLAG_WP
	uffdFeatureShmemWP  = 1 << 12 // UFFD_FEATURE_WP_HUGETLBFS_SHMEM
	uffdFeatureAbsentWP = 1 << 13 // UFFD_FEATURE_WP_UNPOPULATED
	uffdRegisterWP      = 1 << 1  // UFFDIO_REGISTER_MODE_WP
	uffdWriteProtectOn  = 1 << 0  // UFFDIO_WRITEPROTECT_MODE_WP
	uffdEventPagefault  = 0x12    // UFFD_EVENT_PAGEFAULT
	uffdMessagesPerRead = 16
)

type (
	uffdAPI          struct{ api, features, ioctls uint64 }
	uffdRange        struct{ start, length uint64 }
	uffdRegister     struct{ start, length, mode, ioctls uint64 }
	uffdWriteProtect struct{ start, length, mode uint64 }
	// uffdMessage is struct uffd_msg of a page fault.
	uffdMessage struct {
		event   uint8
		_       [15]uint8 // includes the flags; only write faults are registered
		address uint64
		_       uint64
	}
)

// The kernel's ABI; a wrong size does not compile.
var (
	_ [24]byte = [unsafe.Sizeof(uffdAPI{})]byte{}
	_ [32]byte = [unsafe.Sizeof(uffdRegister{})]byte{}
	_ [24]byte = [unsafe.Sizeof(uffdWriteProtect{})]byte{}
	_ [32]byte = [unsafe.Sizeof(uffdMessage{})]byte{}
)

// userfaultfd reports writes to protected pages.
type userfaultfd int

// newUserfaultfd makes a userfaultfd from /dev/userfaultfd that can protect
// shmem. absent says that it also protects anonymous pages that are not present
// (since Linux 6.4).
func newUserfaultfd(device *os.File) (u userfaultfd, absent bool, err error) {
	if u, err = openUserfaultfd(device, uffdFeatureAbsentWP); err == nil {
		return u, true, nil
	}
	u, err = openUserfaultfd(device, 0)
	return u, false, err
}

// openUserfaultfd makes a userfaultfd that can protect shmem and has some more
// features.
func openUserfaultfd(device *os.File, features uint64) (userfaultfd, error) {
	r, _, errno := unix.Syscall(unix.SYS_IOCTL, device.Fd(), userfaultfdNew, unix.O_CLOEXEC|unix.O_NONBLOCK)
	if errno != 0 {
		return -1, fmt.Errorf("make a userfaultfd: %w", errno)
	}
	u := userfaultfd(r)
	api := uffdAPI{api: uffdAPIVersion, features: uffdFeatureWP | uffdFeatureShmemWP | features}
	if err := u.ioctl(uffdioAPI, unsafe.Pointer(&api)); err != nil {
		return -1, errors.Join(fmt.Errorf("ask userfaultfd for write protection of shared memory: %w", err), u.close())
	}
	return u, nil
}

func (u userfaultfd) close() error { return unix.Close(int(u)) }

// ioctl repeats a request that the kernel could not do just then.
// Invariant: arg lives until the call returns.
func (u userfaultfd) ioctl(request uintptr, arg unsafe.Pointer) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(u), request, uintptr(arg))
		switch errno {
		case 0:
			return nil
		case unix.EAGAIN, unix.EINTR:
		default:
			return errno
		}
	}
}

// register makes the pages of b, which may span several mappings, protectable.
func (u userfaultfd) register(b []byte) error {
	r := uffdRegister{start: uint64(addressOf(b)), length: uint64(len(b)), mode: uffdRegisterWP}
	if err := u.ioctl(uffdioRegister, unsafe.Pointer(&r)); err != nil {
		return fmt.Errorf("register guest memory with userfaultfd: %w", err)
	}
	return nil
}

// protect turns write protection of b on or off. Turning it off wakes the threads
// that wait for these pages. Older kernels accept only one mapping per call;
// protect finds the end of a mapping by halving. An unregistered page cannot be
// protected and never is protected, so it is an error only when protection is
// turned on.
func (u userfaultfd) protect(b []byte, on bool) error {
	w := uffdWriteProtect{start: uint64(addressOf(b)), length: uint64(len(b))}
	if on {
		w.mode = uffdWriteProtectOn
	}
	err := u.ioctl(uffdioWriteProtect, unsafe.Pointer(&w))
	if errors.Is(err, unix.ENOENT) && len(b) > PageSize {
		half := len(b) / 2 &^ (PageSize - 1)
		return errors.Join(u.protect(b[:half], on), u.protect(b[half:], on))
	}
	if err != nil && (on || !errors.Is(err, unix.ENOENT)) {
		return fmt.Errorf("write-protect guest memory (%t): %w", on, err)
	}
	return nil
}

// wake makes threads that wait for pages of b try again.
func (u userfaultfd) wake(b []byte) error {
	r := uffdRange{start: uint64(addressOf(b)), length: uint64(len(b))}
	if err := u.ioctl(uffdioWake, unsafe.Pointer(&r)); err != nil {
		return fmt.Errorf("wake waiters for guest memory: %w", err)
	}
	return nil
}

// wait returns the addresses of waiting writes, or an empty list when stop is
// readable.
func (u userfaultfd) wait(stop int, messages *[uffdMessagesPerRead]uffdMessage) ([]uffdMessage, error) {
	poll := []unix.PollFd{{Fd: int32(u), Events: unix.POLLIN}, {Fd: int32(stop), Events: unix.POLLIN}}
	for {
		if _, err := unix.Poll(poll, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return nil, fmt.Errorf("wait for writes to protected memory: %w", err)
		}
		// Invariant: the bytes are those of messages.
		raw := unsafe.Slice((*byte)(unsafe.Pointer(messages)), unsafe.Sizeof(*messages))
		n, err := unix.Read(int(u), raw)
		switch {
		case err == nil:
			return messages[:n/int(unsafe.Sizeof(messages[0]))], nil
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR):
			return nil, fmt.Errorf("read writes to protected memory: %w", err)
		case poll[1].Revents != 0:
			return nil, nil
		}
	}
}
