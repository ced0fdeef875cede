package netctl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Conn is one end of a control connection. Send may be called from any goroutine,
// Receive from one.
type Conn struct {
	socket *net.UnixConn

	mu sync.Mutex // serialises Send
}

// NewConn wraps a connected socket and takes it over.
func NewConn(socket *net.UnixConn) *Conn { return &Conn{socket: socket} }

// Close closes the socket, which ends a running Receive.
func (c *Conn) Close() error { return c.socket.Close() }

// headerSize is the size of the length field.
const headerSize = 4

// Send sends one message before the deadline, with a copy of file if that is not nil.
// After an error nothing more can be sent, because a part of the message may be on
// its way.
func (c *Conn) Send(deadline time.Time, m Message, file *os.File) error {
	b := append(make([]byte, headerSize, 256), Marshal(m)...)
	if len(b)-headerSize > MaxMessage {
		return fmt.Errorf("send control message: %w: it has %d bytes, at most %d are possible", ErrInvalid, len(b)-headerSize, MaxMessage)
	}
	binary.LittleEndian.PutUint32(b, uint32(len(b)-headerSize))
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.socket.SetWriteDeadline(deadline)
	n := 0
	if err == nil && file != nil {
		n, err = c.sendWith(b, file)
	}
	// An empty write would fail if the peer has closed the connection, which it may
	// have done after it received the whole message.
	if err == nil && n < len(b) {
		var more int
		more, err = c.socket.Write(b[n:])
		n += more
	}
	switch {
	case err == nil:
		return nil
	case n == 0 && errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("send control message: %w", errUnsent)
	}
	return fmt.Errorf("send control message: %w", err)
}

// errUnsent says that no part of a message was sent in time. The connection can still
// be used.
var errUnsent = fmt.Errorf("there was no time: %w", context.DeadlineExceeded)

// sendWith sends a copy of a file with the part of a message that fits now.
func (c *Conn) sendWith(b []byte, file *os.File) (n int, err error) {
	raw, err := file.SyscallConn() // Fd would turn its non-blocking mode off
	if err != nil {
		return 0, err
	}
	var sendErr error
	err = raw.Control(func(fd uintptr) { n, _, sendErr = c.socket.WriteMsgUnix(b, unix.UnixRights(int(fd)), nil) })
	return n, errors.Join(err, sendErr)
}

// ErrNoDescriptor says that a message has come without its descriptor, because this
// process can have no further one.
var ErrNoDescriptor = fmt.Errorf("%w: no descriptor is left for the one of the message", ErrBusy)

// Receive waits for one message until the deadline; the zero time is no deadline. The
// caller owns the file, which is nil for most messages. The error is io.EOF if the
// other end is closed. After any error but ErrNoDescriptor nothing more can be
// received. With ErrNoDescriptor the message is returned as well.
func (c *Conn) Receive(deadline time.Time) (m Message, file *os.File, err error) {
	if err := c.socket.SetReadDeadline(deadline); err != nil {
		return nil, nil, fmt.Errorf("receive control message: %w", err)
	}
	defer func() {
		if err != nil && file != nil {
			_ = file.Close() // the message is not returned
			file = nil
		}
	}()
	size, file, err := c.receiveHeader()
	lost := errors.Is(err, ErrNoDescriptor)
	if err != nil && !lost {
		return nil, file, err
	}
	b, err := readAll(c.socket, int(size))
	if err != nil {
		return nil, file, fmt.Errorf("receive control message: %w", err)
	}
	if m, err = Unmarshal(b); err != nil {
		return nil, file, err
	}
	if _, attach := m.(*Attach); attach != (file != nil || lost) {
		return nil, file, fmt.Errorf("control message of kind %d: a descriptor comes with an Attach, and with nothing else", m.kind())
	}
	if lost {
		return m, nil, fmt.Errorf("receive control message: %w", ErrNoDescriptor)
	}
	return m, file, nil
}

// receiveHeader receives the size of the next message, and its file. Descriptors come
// with the first byte; the kernel closes any that come with later bytes. If the file
// could not be received, the error is ErrNoDescriptor, and the size is right.
func (c *Conn) receiveHeader() (size uint32, file *os.File, err error) {
	var header [headerSize]byte
	oob := make([]byte, unix.CmsgSpace(4))
	lost := false
	for got := 0; got < len(header); {
		n, oobn, flags, _, err := c.socket.ReadMsgUnix(header[got:], oob)
		if err == nil && oobn > 0 {
			if file != nil {
				return 0, file, errors.New("receive control message: it has more than one descriptor")
			}
			file, err = receivedFile(oob[:oobn])
		}
		switch {
		case errors.Is(err, unix.ECONNRESET) || errors.Is(err, io.EOF) && got == 0:
			return 0, file, io.EOF // the peer may have died with unread messages
		case errors.Is(err, io.EOF):
			return 0, file, fmt.Errorf("receive control message: %w", io.ErrUnexpectedEOF)
		case err == nil && flags&unix.MSG_CTRUNC != 0 && oobn == 0 && file == nil && !lost:
			// oob has room for one descriptor, so it was the descriptor table of this
			// process that was full (scm_detach_fds of Linux).
			lost = true
		case err == nil && flags&unix.MSG_CTRUNC != 0:
			return 0, file, errors.New("receive control message: it has more than one descriptor")
		case err != nil:
			return 0, file, fmt.Errorf("receive control message: %w", err)
		}
		got += n
	}
	if size = binary.LittleEndian.Uint32(header[:]); size == 0 || size > MaxMessage {
		return 0, file, fmt.Errorf("receive control message: it says that it has %d bytes, 1 to %d are possible", size, MaxMessage)
	}
	if lost {
		return size, nil, ErrNoDescriptor
	}
	return size, file, nil
}

// readAll reads size bytes. It takes at most twice as much memory as the bytes that
// have arrived.
func readAll(r io.Reader, size int) ([]byte, error) {
	const step = 64 << 10
	b := make([]byte, 0, min(size, step))
	for len(b) < size {
		if len(b) == cap(b) {
			b = append(make([]byte, 0, min(size, 2*cap(b))), b...)
		}
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return nil, err
		}
	}
	return b, nil
}

// receivedFile returns the one descriptor of a message. The kernel does not copy
// further descriptors, since oob has no room for them.
func receivedFile(oob []byte) (*os.File, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(messages) != 1 {
		return nil, fmt.Errorf("%d control messages: %w", len(messages), errors.Join(err, errors.New("one with a descriptor is possible")))
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return nil, err
	}
	if len(fds) != 1 {
		for _, fd := range fds {
			_ = unix.Close(fd) // there is no room for two
		}
		return nil, fmt.Errorf("%d descriptors, one is possible", len(fds))
	}
	return os.NewFile(uintptr(fds[0]), "wire"), nil
}

// Gone reports whether the other end is closed. Unread messages may remain.
func (c *Conn) Gone() bool {
	raw, err := c.socket.SyscallConn()
	if err != nil {
		return true
	}
	gone := true // true if this end is closed
	_ = raw.Control(func(fd uintptr) {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		for {
			n, err := unix.Poll(poll, 0)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			gone = err != nil || n > 0
			return
		}
	})
	return gone
}

// PeerUID is the user id of the process at the other end when it connected.
func (c *Conn) PeerUID() (uint32, error) { return peerUID(c.socket) }

// ListenerUID is the user id of the process that made a listening socket. The kernel
// records it as it does for connections (unix(7), SO_PEERCRED).
func ListenerUID(l *net.UnixListener) (uint32, error) { return peerUID(l) }

func peerUID(socket syscall.Conn) (uint32, error) {
	raw, err := socket.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(err, credErr); err != nil {
		return 0, fmt.Errorf("find out who is at the other end of a control socket: %w", err)
	}
	return cred.Uid, nil
}
