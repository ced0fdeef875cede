package stack

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// Counters count a connection's bytes while it runs.
type Counters struct {
	// Sent counts the bytes from the sandbox to the outside, and Received the bytes
	// that came back.
	Sent, Received atomic.Int64
}

// copyBuffer is how many bytes are copied at once: the payload of the longest segment
// from the sandbox.
const copyBuffer = 64 << 10

// frameBuffer is how many bytes are read from outside at once. With headers they fit
// into one frame to the sandbox. 64 KiB would need a full frame and a second one of
// some fifty bytes each time.
const frameBuffer = 63 << 10

// copyBuffers are used only while bytes are copied. A waiting connection has no
// buffer.
var copyBuffers = sync.Pool{New: func() any { return new([copyBuffer]byte) }}

// End is the way in which a connection ended.
type End uint8

// The ways in which connections end.
const (
	// Ended: both sides closed the connection, each in its own direction.
	Ended End = iota
	ResetInside
	ResetOutside
)

// Splice copies bytes both ways until both directions have ended, and then closes
// both sides. It passes the end of one direction on as a half-close. If one side is
// reset, it resets the other. It returns the way in which the connection ended first.
func Splice(inside Conn, outside net.Conn, n *Counters) End {
	s := &splice{inside: inside, outside: outside}
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.direction(moverOf(outside, inside), inside, ResetOutside, &n.Received)
	}()
	s.direction(moverOf(inside, outside), outside, ResetInside, &n.Sent)
	<-done
	// Both directions have ended, so closing loses no data.
	_ = inside.Close()
	_ = outside.Close()
	return s.end
}

type splice struct {
	inside  Conn
	outside net.Conn
	once    sync.Once
	end     End // written through once
}

// direction copies one direction, and passes its end on. broken is the End for an
// error of its source. An error of its destination is the other End.
func (s *splice) direction(m mover, to net.Conn, broken End, n *atomic.Int64) {
	other := ResetInside + ResetOutside - broken
	for {
		moved, readErr, writeErr := m.move()
		n.Add(int64(moved))
		switch {
		case writeErr != nil:
			s.reset(other)
			return
		case readErr == nil:
		case errors.Is(readErr, io.EOF):
			if closeWrite(to) != nil {
				s.reset(other)
			}
			return
		default:
			s.reset(broken)
			return
		}
	}
}

// mover moves bytes in one direction. It waits until there are bytes, or until the
// destination takes some.
type mover interface {
	move() (n int, readErr, writeErr error)
}

func moverOf(from, to net.Conn) mover {
	through := copied{sourceOf(from), to}
	inside, fromInside := from.(*insideConn)
	outside, toSocket := to.(*net.TCPConn) // not a type that wraps a TCPConn, since its Write may do more
	if fromInside && toSocket {
		if raw, err := outside.SyscallConn(); err == nil {
			return &direct{inside: inside, to: newRawSink(raw), full: through}
		}
	}
	return through
}

// copied moves bytes through a buffer.
type copied struct {
	from source
	to   net.Conn
}

// move implements mover.
func (c copied) move() (n int, readErr, writeErr error) {
	buffer, size, readErr := c.from.next()
	if size > 0 {
		n, writeErr = c.to.Write(buffer[:size])
	}
	if buffer != nil {
		copyBuffers.Put(buffer)
	}
	return n, readErr, writeErr
}

// direct moves bytes from netstack's buffers to a socket without copying them in
// between, as long as the socket takes them at once.
type direct struct {
	inside *insideConn
	to     *rawSink
	// full waits when the socket has no room.
	full mover
}

// move implements mover.
func (d *direct) move() (n int, readErr, writeErr error) {
	d.to.err = nil
	n, err := d.inside.readTo(d.to)
	switch {
	case n > 0:
		return n, nil, nil // an error that has stopped it will stop the next call, too
	case errors.Is(err, errWait):
		return 0, d.inside.waitRead(), nil
	case errors.Is(d.to.err, unix.EAGAIN):
		return d.full.move()
	case d.to.err != nil:
		return 0, nil, d.to.err
	default:
		return 0, err, nil
	}
}

// rawSink writes as many bytes to a socket as it takes at once. It does not hold the
// socket any longer, because closing the socket waits for it.
type rawSink struct {
	raw   syscall.RawConn
	write func(fd uintptr) bool
	// The bytes to write, and the result.
	b   []byte
	n   int
	err error
}

func newRawSink(raw syscall.RawConn) *rawSink {
	s := &rawSink{raw: raw}
	s.write = func(fd uintptr) bool {
		for {
			s.n, s.err = unix.Write(int(fd), s.b)
			if !errors.Is(s.err, unix.EINTR) {
				return true
			}
		}
	}
	return s
}

// Write implements io.Writer. It fails with EAGAIN if the socket does not take all of b.
func (s *rawSink) Write(b []byte) (int, error) {
	s.b, s.n, s.err = b, 0, nil
	if err := s.raw.Write(s.write); err != nil {
		s.err = err
	}
	s.b = nil
	n := max(s.n, 0)
	if s.err == nil && n < len(b) {
		s.err = unix.EAGAIN
	}
	return n, s.err
}

// reset ends both sides with a RST. That ends the other direction as well.
func (s *splice) reset(end End) {
	s.once.Do(func() {
		s.end = end
		_ = s.inside.Reset() // it never fails
		if t, ok := s.outside.(*net.TCPConn); ok {
			_ = t.SetLinger(0) // it fails only on a closed socket, which needs no RST
		}
		_ = s.outside.Close()
	})
}

// closeWrite ends a direction. A connection that is closed already needs no FIN.
func closeWrite(c net.Conn) error {
	half, ok := c.(interface{ CloseWrite() error })
	if !ok {
		return errors.New("a connection without half-close")
	}
	if err := half.CloseWrite(); err != nil && !errors.Is(err, syscall.ENOTCONN) {
		return err
	}
	return nil
}

// source is the origin of a direction's bytes. It takes a buffer only once there are
// bytes to read. The caller returns the buffer.
type source interface {
	next() (buffer *[copyBuffer]byte, n int, err error)
}

func sourceOf(c net.Conn) source {
	switch c := c.(type) {
	case *insideConn:
		return c
	case *net.TCPConn: // not a type that wraps a TCPConn, since its Read may do more
		if raw, err := c.SyscallConn(); err == nil {
			return newRawSource(raw)
		}
	}
	return plainSource{c}
}

// next implements source.
func (i *insideConn) next() (*[copyBuffer]byte, int, error) {
	for {
		b := copyBuffers.Get().(*[copyBuffer]byte)
		n, err := i.tryRead(b[:])
		if !errors.Is(err, errWait) {
			return b, n, err
		}
		copyBuffers.Put(b)
		if err := i.waitRead(); err != nil {
			return nil, 0, err
		}
	}
}

// rawSource reads a socket.
type rawSource struct {
	raw  syscall.RawConn
	read func(fd uintptr) bool
	// The result of the last read.
	buffer *[copyBuffer]byte
	n      int
	err    error
}

func newRawSource(raw syscall.RawConn) *rawSource {
	s := &rawSource{raw: raw}
	s.read = func(fd uintptr) bool {
		s.buffer = copyBuffers.Get().(*[copyBuffer]byte)
		for {
			s.n, s.err = unix.Read(int(fd), s.buffer[:frameBuffer])
			if !errors.Is(s.err, unix.EINTR) {
				break
			}
		}
		if errors.Is(s.err, unix.EAGAIN) {
			copyBuffers.Put(s.buffer)
			s.buffer = nil
			return false
		}
		return true
	}
	return s
}

// next implements source.
func (s *rawSource) next() (*[copyBuffer]byte, int, error) {
	s.buffer, s.n, s.err = nil, 0, nil
	if err := s.raw.Read(s.read); err != nil {
		return nil, 0, err
	}
	if s.err == nil && s.n == 0 {
		s.err = io.EOF
	}
	return s.buffer, max(s.n, 0), s.err
}

// plainSource reads any connection. It holds a buffer while it waits.
type plainSource struct{ r io.Reader }

// next implements source.
func (s plainSource) next() (*[copyBuffer]byte, int, error) {
	b := copyBuffers.Get().(*[copyBuffer]byte)
	n, err := s.r.Read(b[:])
	return b, n, err
}
