package agent

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// These are the system calls of a renewal. They are raw, because a call that goes
// through the Go scheduler wakes its monitor thread after an idle time, and in every
// fork that is another thread with pages of its own. They do not block as long as the
// file system of /etc answers; if it does not, a renewal is impossible anyway.

func rawFstat(fd int, st *unix.Stat_t) error {
	_, _, errno := syscall.RawSyscall(unix.SYS_FSTAT, uintptr(fd), uintptr(unsafe.Pointer(st)), 0)
	return asError(errno)
}

// rawPread and rawPwrite need at least one byte.
func rawPread(fd int, p []byte, off int64) (int, error) {
	n, _, errno := syscall.RawSyscall6(unix.SYS_PREAD64, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)), uintptr(off), 0, 0)
	return int(n), asError(errno)
}

func rawPwrite(fd int, p []byte, off int64) error {
	_, _, errno := syscall.RawSyscall6(unix.SYS_PWRITE64, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)), uintptr(off), 0, 0)
	return asError(errno)
}

func rawFtruncate(fd int, size int64) error {
	_, _, errno := syscall.RawSyscall(unix.SYS_FTRUNCATE, uintptr(fd), uintptr(size), 0)
	return asError(errno)
}

func rawUname(uts *unix.Utsname) error {
	_, _, errno := syscall.RawSyscall(unix.SYS_UNAME, uintptr(unsafe.Pointer(uts)), 0, 0)
	return asError(errno)
}

// rawSetHostname needs a name that is not empty.
func rawSetHostname(name string) error {
	_, _, errno := syscall.RawSyscall(unix.SYS_SETHOSTNAME, uintptr(unsafe.Pointer(unsafe.StringData(name))), uintptr(len(name)), 0)
	return asError(errno)
}

func rawSetClock(clock int32, to *unix.Timespec) error {
	_, _, errno := syscall.RawSyscall(unix.SYS_CLOCK_SETTIME, uintptr(clock), uintptr(unsafe.Pointer(to)), 0)
	return asError(errno)
}

func rawIoctl(fd int, req uint, arg unsafe.Pointer) error {
	// The memory at arg outlives the call. req determines how much of it is used.
	_, _, errno := syscall.RawSyscall(unix.SYS_IOCTL, uintptr(fd), uintptr(req), uintptr(arg))
	return asError(errno)
}

func asError(errno syscall.Errno) error {
	if errno != 0 {
		return errno
	}
	return nil
}
