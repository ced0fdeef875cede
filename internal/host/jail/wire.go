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
// the thread that made it, wherever it is used: whoever has one made in the
// machine's namespace can send messages, and descriptors with them, to every
// abstract address of the machine. So wires are made in the sandbox's namespace,
// in which nobody listens.

// Wire makes the two ends of a wire in the network namespace of the jail: host is
// for whoever plays the network, guest for a process in the jail. The jail of netds
// makes none: it has no network of its own.
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
	if err == nil { // by this thread: that of the jail has laid its capabilities aside
		err = widen(host, guest)
	}
	if err != nil {
		_, _ = host.Close(), guest.Close() // nil is refused
		return nil, nil, err
	}
	return host, guest, nil
}

// WireOf makes them in the network namespace of a process with walls of its own.
// It refuses one that has the machine's.
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
	defer func() { _ = ns.Close() }() // only a name
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

// wireBuffer is how many bytes wait on a wire in each direction, as the kernel
// counts them: 31 of the longest frames, or 900 of 1500 bytes. The usual 208 KiB
// would be 4 of the longest. They are charged to who sends them. How many messages
// wait is bounded by nothing else: net.unix.max_dgram_qlen does not hold for pairs.
const wireBuffer = 2 << 20

// widen makes it so; the kernel doubles what it is told. Without CAP_NET_ADMIN it
// gives as much as net.core.wmem_max allows.
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

// CheckWire refuses a descriptor that is no end of a wire, as a process may have
// sent it that is not to be trusted: it must be a unix datagram socket of another
// network namespace than this one. Whether it ever waits is that process's to say:
// who uses it asks for each message not to (MSG_DONTWAIT).
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
	defer func() { _ = its.Close() }() // only a name
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
