package jail

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// A wire is a pair of unix datagram sockets that carries the frames of a
// sandbox's network interface. Such a socket belongs to the network namespace of
// the thread that made it, no matter where it is used. From a socket made in the
// host's namespace a process could send messages, and descriptors with them, to
// every abstract address of the host. So wires are made in the sandbox's
// namespace, in which no process listens.

// Wire makes the two ends of a wire in the network namespace of the jail: host is
// for the process that plays the network, guest for a process in the jail. A jail
// of netds cannot make wires, because it has no network namespace of its own.
func (j *Jail) Wire() (host, guest *os.File, err error) {
	j.using.RLock()
	defer j.using.RUnlock()
	if j.cfg.Kind != VMM {
		return nil, nil, fmt.Errorf("make a wire in the jail of %s processes: they are in the machine's network", j.cfg.Kind)
	}
	t, err := j.usable()
	if err != nil {
		return nil, nil, err
	}
	t.do(func() { host, guest, err = newWire() })
	if err == nil { // on this thread: the jail's thread has dropped its capabilities
		err = widen(host, guest)
	}
	if err != nil {
		_, _ = host.Close(), guest.Close() // closing nil is harmless
		return nil, nil, err
	}
	return host, guest, nil
}

// WireOf makes a wire in the network namespace of a process with walls of its
// own. It refuses a process in the host's network namespace.
func WireOf(pid int) (host, guest *os.File, err error) {
	made := make(chan struct{})
	onOwnThread(func() {
		defer close(made)
		if err = enterNetwork(pid); err == nil {
			host, guest, err = newWire()
		}
	})
	<-made
	if err == nil {
		if err = widen(host, guest); err != nil {
			err = errors.Join(err, host.Close(), guest.Close())
		}
	}
	if err != nil {
		return nil, nil, fmt.Errorf("make a wire in the network of process %d: %w", pid, err)
	}
	return host, guest, nil
}

// enterNetwork moves the thread into the network namespace of a process.
func enterNetwork(pid int) error {
	ns, err := os.Open("/proc/" + strconv.Itoa(pid) + "/ns/net")
	if err != nil {
		return err
	}
	defer func() { _ = ns.Close() }() // the descriptor only names the namespace
	own, err := os.Stat("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	its, err := ns.Stat()
	if err != nil {
		return err
	}
	if os.SameFile(own, its) {
		return errors.New("it has no network namespace of its own")
	}
	return os.NewSyscallError("setns", unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET))
}

func newWire() (host, guest *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a wire: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "wire"), os.NewFile(uintptr(fds[1]), "wire"), nil
}

// wireBuffer is how many bytes can wait on a wire in each direction, by the
// kernel's count: 31 of the longest frames, or 900 frames of 1500 bytes. The
// default of 208 KiB would hold 4 of the longest. The bytes are charged to the
// sender. This is the only bound on waiting messages: net.unix.max_dgram_qlen does
// not apply to socket pairs.
const wireBuffer = 2 << 20

// widen sets the buffers of the ends to wireBuffer; the kernel doubles the value
// that it is given. Without CAP_NET_ADMIN the buffers get at most
// net.core.wmem_max.
func widen(ends ...*os.File) error {
	for _, f := range ends {
		raw, err := f.SyscallConn()
		if err != nil {
			return fmt.Errorf("widen a wire: %w", err)
		}
		ctlErr := raw.Control(func(fd uintptr) {
			if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, wireBuffer/2) != nil {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, wireBuffer/2)
			}
		})
		if err = errors.Join(err, ctlErr); err != nil {
			return fmt.Errorf("widen a wire: %w", err)
		}
	}
	return nil
}

// CheckWire refuses a descriptor that is not the end of a wire. An untrusted
// process may have sent it, so it must be a unix datagram socket of a network
// namespace other than this one. The untrusted process can switch the socket to
// blocking mode at any time, so each message must be sent and received with
// MSG_DONTWAIT.
func CheckWire(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("look at a wire: %w", err)
	}
	ctlErr := raw.Control(func(fd uintptr) { err = checkWire(int(fd)) })
	if err = errors.Join(err, ctlErr); err != nil {
		return fmt.Errorf("look at a wire: %w", err)
	}
	return nil
}

func checkWire(fd int) error {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return os.NewSyscallError("getsockopt", err)
	}
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil {
		return os.NewSyscallError("getsockopt", err)
	}
	if domain != unix.AF_UNIX || kind != unix.SOCK_DGRAM {
		return fmt.Errorf("it is a socket of family %d and type %d", domain, kind)
	}
	ns, err := unix.IoctlRetInt(fd, unix.SIOCGSKNS)
	if err != nil {
		return os.NewSyscallError("ioctl SIOCGSKNS", err)
	}
	its := os.NewFile(uintptr(ns), "network namespace")
	defer func() { _ = its.Close() }() // the descriptor only names the namespace
	have, err := its.Stat()
	if err != nil {
		return err
	}
	own, err := os.Stat("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	if os.SameFile(have, own) {
		return errors.New("it belongs to the network of this process")
	}
	return nil
}
