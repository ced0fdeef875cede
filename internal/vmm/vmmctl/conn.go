package vmmctl

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Conn is one end of a control socket. Send may be called from any
// goroutine, Receive from one.
type Conn struct {
	file *os.File
	raw  syscall.RawConn

	mu  sync.Mutex // serialises Send
	buf []byte     // of Receive, which reuses it
	oob []byte
}

// usualMessage is the size of the buffer that Receive keeps. Each vmm process
// has a Conn, and its memory is charged to the sandbox. So the larger messages,
// the first and the last of a VM, get temporary buffers.
const usualMessage = 1 << 10

// NewConn wraps a SOCK_SEQPACKET socket and takes it over.
func NewConn(f *os.File) (*Conn, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	return &Conn{file: f, raw: raw}, nil
}

// Pair makes the two ends of a control socket. Both are close-on-exec.
func Pair() (parent, child *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make control socket: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "vmm control"), os.NewFile(uintptr(fds[1]), "vmm control"), nil
}

// Close closes the socket; a running Receive returns.
func (c *Conn) Close() error { return c.file.Close() }

// Send sends one message with copies of the given files. Without files it uses
// write, because a vmm process cannot send in any other way.
func (c *Conn) Send(m Message, files ...*os.File) error { return c.SendBytes(Marshal(m), files...) }

// SendBytes is Send for a message of another protocol.
func (c *Conn) SendBytes(b []byte, files ...*os.File) error {
	if len(b) > MaxMessage || len(files) > MaxFiles {
		return fmt.Errorf("send control message: %d bytes and %d files: at most %d and %d", len(b), len(files), MaxMessage, MaxFiles)
	}
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
		defer runtime.KeepAlive(files)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var sendErr error
	err := c.raw.Write(func(fd uintptr) bool {
		if rights == nil {
			_, sendErr = unix.Write(int(fd), b) // the socket preserves message boundaries: the call writes all of b or fails
		} else {
			sendErr = unix.Sendmsg(int(fd), b, rights, nil, unix.MSG_NOSIGNAL)
		}
		return !errors.Is(sendErr, unix.EAGAIN) && !errors.Is(sendErr, unix.EINTR)
	})
	if err := errors.Join(err, sendErr); err != nil {
		return fmt.Errorf("send control message: %w", err)
	}
	return nil
}

// Receive waits for one message. The caller owns the files. The error is
// io.EOF when the other end is closed.
func (c *Conn) Receive() (Message, []*os.File, error) {
	b, files, err := c.ReceiveBytes()
	if err != nil {
		return nil, nil, err
	}
	m, err := Unmarshal(b)
	if err != nil {
		for _, f := range files {
			err = errors.Join(err, f.Close())
		}
		return nil, nil, err
	}
	return m, files, nil
}

// ReceiveBytes is Receive for a message of another protocol. The bytes are
// valid until the next call.
func (c *Conn) ReceiveBytes() ([]byte, []*os.File, error) {
	if c.buf == nil {
		c.buf = make([]byte, usualMessage)
		c.oob = make([]byte, unix.CmsgSpace(4*MaxFiles))
	}
	buf := c.buf
	var n, oobn, flags int
	var recvErr error
	err := c.raw.Read(func(fd uintptr) bool {
		// Peeking at a message with room for its descriptors would copy them.
		// Without room the kernel makes no copies.
		if n, _, _, _, recvErr = unix.Recvmsg(int(fd), nil, nil, unix.MSG_PEEK|unix.MSG_TRUNC); recvErr == nil {
			if n > len(buf) {
				buf = make([]byte, min(n, MaxMessage))
			}
			n, oobn, flags, _, recvErr = unix.Recvmsg(int(fd), buf, c.oob, unix.MSG_CMSG_CLOEXEC)
		}
		return !errors.Is(recvErr, unix.EAGAIN) && !errors.Is(recvErr, unix.EINTR)
	})
	if errors.Is(recvErr, unix.ECONNRESET) {
		return nil, nil, io.EOF // the peer died with unread messages
	}
	if err := errors.Join(err, recvErr); err != nil {
		return nil, nil, fmt.Errorf("receive control message: %w", err)
	}
	files, err := receivedFiles(c.oob[:oobn])
	if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = errors.New("receive control message: it is larger than allowed")
	}
	if err == nil && n == 0 {
		err = io.EOF
	}
	if err != nil {
		for _, f := range files {
			err = errors.Join(err, f.Close())
		}
		return nil, nil, err
	}
	return buf[:n], files, nil
}

func receivedFiles(oob []byte) ([]*os.File, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("parse descriptors of control message: %w", err)
	}
	var files []*os.File
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return files, fmt.Errorf("parse descriptors of control message: %w", err)
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "passed"))
		}
	}
	return files, nil
}
