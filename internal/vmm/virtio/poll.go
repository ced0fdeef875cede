package virtio

import "golang.org/x/sys/unix"

// verdict tells a goroutine that moves data between a host socket and the guest
// how to continue.
type verdict int

const (
	again      verdict = iota
	waitSocket         // until the socket is ready
	waitWake           // until the guest or the VMM acts
	linger             // like waitWake, but with a time limit
	finished
)

// hungUp reports whether a socket can neither be read nor written any more.
func hungUp(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd)}}
	_, err := unix.Poll(p, 0)
	return err == nil && p[0].Revents&(unix.POLLHUP|unix.POLLERR|unix.POLLNVAL) != 0
}
