package inside

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctlIfreq is not exported by x/sys.
func ioctlIfreq(fd int, req uint, ifr *unix.Ifreq) error {
	// ifr is a struct ifreq and outlives the call, which keeps no pointer.
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(req), uintptr(unsafe.Pointer(ifr)))
	if errno != 0 {
		return errno
	}
	return nil
}
