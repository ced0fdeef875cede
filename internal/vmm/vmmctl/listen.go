package vmmctl

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// Listen makes a socket at path. A vmm that gets it accepts parents on it. The
// folder's permissions decide which processes may connect.
func Listen(path string) (*os.File, error) {
	return withSocket("listen", path, func(fd int, addr unix.Sockaddr) error {
		return errors.Join(unix.Bind(fd, addr), unix.Listen(fd, 16))
	})
}

// Dial connects to a vmm that listens at path.
func Dial(path string) (*Conn, error) {
	f, err := withSocket("connect", path, unix.Connect)
	if err != nil {
		return nil, err
	}
	return NewConn(f)
}

// withSocket reaches the socket through its folder: a socket's path has at most
// 107 bytes, a folder's path may be longer.
func withSocket(what, path string, do func(fd int, addr unix.Sockaddr) error) (*os.File, error) {
	fail := func(err error) (*os.File, error) {
		return nil, fmt.Errorf("%s control socket %s: %w", what, path, err)
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return fail(err)
	}
	defer func() { _ = dir.Close() }() // only used in the path
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fail(err)
	}
	short := "/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + filepath.Base(path)
	if err := do(fd, &unix.SockaddrUnix{Name: short}); err != nil {
		return fail(errors.Join(err, unix.Close(fd)))
	}
	return os.NewFile(uintptr(fd), "vmm control"), nil
}

// Accept waits for the next parent on a listening socket.
func Accept(listener *os.File) (*Conn, error) {
	raw, err := listener.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("accept a parent: %w", err)
	}
	fd := -1
	var acceptErr error
	err = raw.Read(func(l uintptr) bool {
		fd, _, acceptErr = unix.Accept4(int(l), unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
		return !errors.Is(acceptErr, unix.EAGAIN) && !errors.Is(acceptErr, unix.EINTR)
	})
	if err := errors.Join(err, acceptErr); err != nil {
		return nil, fmt.Errorf("accept a parent: %w", err)
	}
	return NewConn(os.NewFile(uintptr(fd), "vmm control"))
}
