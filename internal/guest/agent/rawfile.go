package agent

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// System calls of a renewal. They are raw: one that goes through the Go
// scheduler wakes its monitor thread after an idle time, which in every fork
// is another thread with pages of its own. They do not block, as long as the
// file system of /etc answers; with one that does not there is no renewal
// either.

func rawFstat(fd int, st *unix.Stat_t) error {
	_, _, errno := syscall.RawSyscall(unix.SYS_FSTAT, uintptr(fd), uintptr(unsafe.Pointer(st)), 0)
	return asError(errno)
}

// rawPread and rawPwrite are for at least one byte.
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

// rawSetHostname is for a name that is not empty.
func rawSetHostname(name string) error {
	_, _, errno := syscall.RawSyscall(unix.SYS_SETHOSTNAME, uintptr(unsafe.Pointer(unsafe.StringData(name))), uintptr(len(name)), 0)
	return asError(errno)
}

func rawSetClock(clock int32, to *unix.Timespec) error {
	_, _, errno := syscall.RawSyscall(unix.SYS_CLOCK_SETTIME, uintptr(clock), uintptr(unsafe.Pointer(to)), 0)
	return asError(errno)
}

func rawIoctl(fd int, req uint, arg unsafe.Pointer) error {
	// What arg points to outlives the call; how much of it is used says req.
	_, _, errno := syscall.RawSyscall(unix.SYS_IOCTL, uintptr(fd), uintptr(req), uintptr(arg))
	return asError(errno)
}

func asError(errno syscall.Errno) error {
	if errno != 0 {
		return errno
	}
	return nil
}
