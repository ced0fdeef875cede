package agent

import (
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Listener accepts connections. Waiting costs one goroutine.
type Listener struct {
	file *os.File
	raw  syscall.RawConn
	path string // of a unix socket, removed by Close
	host bool   // only the host may connect
}

// ListenVsock listens on a vsock port for connections of the host.
func ListenVsock(port uint32) (*Listener, error) {
	l, err := listen(unix.AF_VSOCK, &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: port})
	if err != nil {
		return nil, failed("listen on", "vsock", err)
	}
	l.host = true
	return l, nil
}

// ListenUnix listens on a unix socket, for an agent outside of a VM. Access to the
// socket gives all rights of the agent, so the socket is private.
func ListenUnix(path string) (*Listener, error) {
	l, err := listen(unix.AF_UNIX, &unix.SockaddrUnix{Name: path})
	if err == nil {
		l.path = path
		if err = unix.Chmod(path, 0o600); err != nil {
			_ = l.Close()
		}
	}
	if err != nil {
		return nil, failed("listen on", path, err)
	}
	return l, nil
}

func listen(family int, addr unix.Sockaddr) (*Listener, error) {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err = unix.Bind(fd, addr); err == nil {
		err = unix.Listen(fd, maxConns)
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "listener")
	raw, err := file.SyscallConn()
	if err != nil {
		_ = file.Close()
		return nil, err
	}
	return &Listener{file: file, raw: raw}, nil
}

// Close ends an Accept under way.
func (l *Listener) Close() error {
	if l.path != "" {
		_ = os.Remove(l.path) // someone may have removed it before
	}
	return l.file.Close()
}

// fullWait is the wait when the agent has no descriptor or memory for a connection,
// for which the kernel has no event.
const fullWait = 100 * time.Millisecond

// Accept waits for a connection. It fails only after Close.
func (l *Listener) Accept() (*Conn, error) {
	for {
		fd, err := l.accept()
		switch err {
		case nil:
			if c, err := NewConn(fd); err == nil {
				return c, nil
			}
		case unix.ECONNABORTED, errNotHost:
		case unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM:
			time.Sleep(fullWait)
		default:
			return nil, &Error{Kind: ErrClosed, Op: "accept", Thing: "connection", Cause: err}
		}
	}
}

const errNotHost = Kind("connection not from the host")

// accept waits for a connection and checks its origin: a process in the guest can
// also reach the port, through the loopback CID.
func (l *Listener) accept() (int, error) {
	var fd uintptr
	var errno syscall.Errno
	var from unix.RawSockaddrVM
	err := l.raw.Read(func(listener uintptr) bool {
		size := uint32(unix.SizeofSockaddrVM)
		// from and size outlive the call, which writes at most size bytes. The
		// address of a unix socket is cut.
		fd, _, errno = syscall.RawSyscall6(unix.SYS_ACCEPT4, listener, uintptr(unsafe.Pointer(&from)),
			uintptr(unsafe.Pointer(&size)), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
		return errno != syscall.EAGAIN && errno != syscall.EINTR
	})
	if err != nil {
		return -1, err
	}
	if errno != 0 {
		return -1, errno
	}
	if l.host && !fromHost(&from) {
		unix.Close(int(fd))
		return -1, errNotHost
	}
	return int(fd), nil
}

func fromHost(a *unix.RawSockaddrVM) bool {
	return a.Family == unix.AF_VSOCK && a.Cid == unix.VMADDR_CID_HOST
}

// SayReady tells the host that the agent listens, by dialing a vsock port of the
// host. The attempt itself is the message: the host may refuse the connection, which
// carries no data.
func SayReady(port uint32) error {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return failed("tell the host", "ready", err)
	}
	defer unix.Close(fd)
	err = unix.Connect(fd, &unix.SockaddrVM{CID: unix.VMADDR_CID_HOST, Port: port})
	if err != nil && err != unix.ECONNRESET {
		return failed("tell the host", "ready", err)
	}
	return nil
}
