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
	// Sent are the bytes from the sandbox to the outside, Received those that came back.
	Sent, Received atomic.Int64
}

// copyBuffer is how much is copied at once: all that the longest segment from the sandbox
// carries.
const copyBuffer = 64 << 10

// frameBuffer is how much is read from outside at once. With headers it fits into one
// frame to the sandbox: 64 KiB would be a full frame and one of some fifty bytes behind it,
// each time.
const frameBuffer = 63 << 10

// copyBuffers are used while there is something to copy: a connection that waits
// has none.
var copyBuffers = sync.Pool{New: func() any { return new([copyBuffer]byte) }}

// End says how a connection ended.
type End uint8

// The ends of connections.
const (
	// Ended connections were closed by both sides, each for its own direction.
	Ended End = iota
	ResetInside
	ResetOutside
)

// Splice copies bytes both ways until both directions have ended, and closes both
// sides. The end of one direction is passed on as such (half-close), a connection that
// was reset on one side is reset on the other. Splice returns which side was first.
func Splice(inside Conn, outside net.Conn, n *Counters) End {
	s := &splice{inside: inside, outside: outside}
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.direction(moverOf(outside, inside), inside, ResetOutside, &n.Received)
	}()
	s.direction(moverOf(inside, outside), outside, ResetInside, &n.Sent)
	<-done
	// Both directions have ended: nothing can be lost by these any more.
	_ = inside.Close()
	_ = outside.Close()
	return s.end
}

type splice struct {
	inside  Conn
	outside net.Conn
	once    sync.Once
	end     End // is written by once
}

// direction copies one direction, and passes its end on. broken is what an error of
// its source means; one of its destination means the other.
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

// mover moves bytes of one direction. It waits until there are some, or until the
// destination takes some.
type mover interface {
	move() (n int, readErr, writeErr error)
}

func moverOf(from, to net.Conn) mover {
	through := copied{sourceOf(from), to}
	inside, fromInside := from.(*insideConn)
	outside, toSocket := to.(*net.TCPConn) // and nothing that wraps one, whose Write may do more
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

// direct moves bytes from where netstack has them to a socket, without a copy of them in
// between, as long as the socket takes them at once.
type direct struct {
	inside *insideConn
	to     *rawSink
	// full waits for a socket that has no room.
	full mover
}

// move implements mover.
func (d *direct) move() (n int, readErr, writeErr error) {
	d.to.err = nil
	n, err := d.inside.readTo(d.to)
	switch {
	case n > 0:
		return n, nil, nil // what has stopped it, if anything, stops the next one, too
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

// rawSink writes to a socket what it takes at once. It holds the socket for no longer:
// whoever closes that waits for it.
type rawSink struct {
	raw   syscall.RawConn
	write func(fd uintptr) bool
	// What is to be written, and the result.
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

// reset ends both sides with a RST, which ends the other direction, too.
func (s *splice) reset(end End) {
	s.once.Do(func() {
		s.end = end
		_ = s.inside.Reset() // it never fails
		if t, ok := s.outside.(*net.TCPConn); ok {
			_ = t.SetLinger(0) // it fails on a closed socket, which needs no RST
		}
		_ = s.outside.Close()
	})
}

// closeWrite ends a direction. A connection that was closed already needs nothing.
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

// source is where a direction comes from. It takes a buffer when there is something
// to read; the caller gives it back.
type source interface {
	next() (buffer *[copyBuffer]byte, n int, err error)
}

func sourceOf(c net.Conn) source {
	switch c := c.(type) {
	case *insideConn:
		return c
	case *net.TCPConn: // and nothing that wraps one, whose Read may do more
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

// plainSource reads anything, with a buffer in hand while it waits.
type plainSource struct{ r io.Reader }

// next implements source.
func (s plainSource) next() (*[copyBuffer]byte, int, error) {
	b := copyBuffers.Get().(*[copyBuffer]byte)
	n, err := s.r.Read(b[:])
	return b, n, err
}
