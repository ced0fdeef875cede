package agent

import (
	"io"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Conn is a stream socket that waits in the runtime's epoll and moves bytes with raw
// system calls. A call that goes through the Go scheduler wakes its monitor thread
// after an idle time, which costs a thread switch for every ping. A raw call does
// not, and since the socket never blocks, it delays nothing.
//
// One goroutine may read and one may write at a time. Close ends both.
type Conn struct {
	file *os.File
	raw  syscall.RawConn
	in   transfer
	out  transfer
}

// transfer is one direction: the arguments and results of step, which is made
// once so that reading and writing allocate nothing.
type transfer struct {
	trap  uintptr
	step  func(fd uintptr) bool
	buf   []byte
	n     int
	errno syscall.Errno
}

// NewConn takes over fd, a stream socket.
func NewConn(fd int) (*Conn, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, failed("prepare", "connection", err)
	}
	file := os.NewFile(uintptr(fd), "connection")
	raw, err := file.SyscallConn()
	if err != nil {
		_ = file.Close()
		return nil, failed("prepare", "connection", err)
	}
	c := &Conn{file: file, raw: raw, in: transfer{trap: unix.SYS_READ}, out: transfer{trap: unix.SYS_WRITE}}
	c.in.step, c.out.step = c.in.run, c.out.run
	return c, nil
}

// run makes the call; false asks to be called again when the socket is ready.
func (t *transfer) run(fd uintptr) bool {
	for {
		// buf is not empty, and t keeps it alive during the call.
		n, _, errno := syscall.RawSyscall(t.trap, fd, uintptr(unsafe.Pointer(&t.buf[0])), uintptr(len(t.buf)))
		switch errno {
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
			return false
		}
		t.n, t.errno = int(n), errno
		return true
	}
}

// do moves bytes once. wait is the poller's Read or Write.
func (t *transfer) do(p []byte, wait func(func(uintptr) bool) error) (int, error) {
	t.buf = p
	err := wait(t.step)
	t.buf = nil
	if err != nil {
		return 0, err
	}
	if t.errno != 0 {
		return 0, t.errno
	}
	return t.n, nil
}

// Read implements io.Reader.
func (c *Conn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	n, err := c.in.do(p, c.raw.Read)
	if n == 0 && err == nil {
		err = io.EOF
	}
	return n, err
}

// Write implements io.Writer. SIGPIPE is not raised: the runtime ignores it
// for every descriptor but 1 and 2.
func (c *Conn) Write(p []byte) (int, error) {
	written := 0
	for written < len(p) {
		n, err := c.out.do(p[written:], c.raw.Write)
		written += n
		if err != nil {
			return written, err
		}
	}
	return written, nil
}

// Close implements io.Closer.
func (c *Conn) Close() error { return c.file.Close() }

// SyscallConn lets guestrpc write without waiting.
func (c *Conn) SyscallConn() (syscall.RawConn, error) { return c.raw, nil }

// CloseWrite tells the other end that no more bytes will come.
func (c *Conn) CloseWrite() error {
	var shutErr error
	err := c.raw.Control(func(fd uintptr) { shutErr = unix.Shutdown(int(fd), unix.SHUT_WR) })
	if err != nil {
		return err
	}
	return shutErr
}
