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
// for whoever plays the network, guest for a process in the jail.
func (j *Jail) Wire() (host, guest *os.File, err error) {
	j.using.RLock()
	defer j.using.RUnlock()
	t, err := j.usable()
	if err != nil {
		return nil, nil, err
	}
	t.do(func() { host, guest, err = newWire() })
	return host, guest, err
}

// WireOf makes them in the network namespace of a process with walls of its own.
// It refuses one that has the machine's.
func WireOf(pid int) (host, guest *os.File, err error) {
	made := make(chan struct{})
	onOwnThread(func() {
		defer close(made)
		if err = enterNetwork(pid); err == nil {
			setQueue()
			host, guest, err = newWire()
		}
	})
	<-made
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

// wireQueue is how many frames wait on a wire at most, if their bytes fit. The
// kernel gives a new namespace 10; systemd gives the machine's as many as this.
const wireQueue = "512"

// setQueue makes it so for wires that are made in the thread's namespace from now
// on. Where settings cannot be written, fewer frames wait.
func setQueue() { _ = os.WriteFile("/proc/sys/net/unix/max_dgram_qlen", []byte(wireQueue), 0) }
