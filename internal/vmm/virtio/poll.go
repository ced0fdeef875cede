package virtio

import "golang.org/x/sys/unix"

// verdict is what a goroutine that moves data between a host socket and the guest
// does next.
type verdict int

const (
	again      verdict = iota
	waitSocket         // until the socket is ready
	waitWake           // until the guest or the VMM does something
	linger             // as waitWake, but not for ever
	finished
)

// hungUp reports whether nothing can be read from or written to a socket any
// more.
func hungUp(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd)}}
	_, err := unix.Poll(p, 0)
	return err == nil && p[0].Revents&(unix.POLLHUP|unix.POLLERR|unix.POLLNVAL) != 0
}
