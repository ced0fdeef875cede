package stack

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// insideConn is a Conn over an endpoint of netstack. One goroutine reads and one
// writes at a time.
type insideConn struct {
	c        *conn
	endpoint tcpip.Endpoint
	events   *waiter.Queue

	readable, writable waiter.Entry
	mayRead, mayWrite  chan struct{}
	readBy, writeBy    deadline

	reset, closed atomic.Bool
	// aborted is closed once the endpoint was reset, some time after reset was set.
	aborted chan struct{}
}

func newInsideConn(c *conn, e tcpip.Endpoint, events *waiter.Queue) *insideConn {
	i := &insideConn{c: c, endpoint: e, events: events, aborted: make(chan struct{})}
	i.readBy.clock, i.writeBy.clock = c.w.clock, c.w.clock
	i.readable, i.mayRead = waiter.NewChannelEntry(waiter.ReadableEvents | waiter.EventHUp | waiter.EventErr)
	i.writable, i.mayWrite = waiter.NewChannelEntry(waiter.WritableEvents | waiter.EventHUp | waiter.EventErr)
	events.EventRegister(&i.readable)
	events.EventRegister(&i.writable)
	return i
}

// errorOf is err as Go's network connections return it.
func errorOf(op string, err tcpip.Error) error {
	var cause error
	switch err.(type) {
	case *tcpip.ErrClosedForReceive:
		return io.EOF
	case *tcpip.ErrClosedForSend:
		cause = syscall.EPIPE
	case *tcpip.ErrConnectionReset:
		cause = syscall.ECONNRESET
	case *tcpip.ErrConnectionAborted, *tcpip.ErrAborted, *tcpip.ErrInvalidEndpointState, *tcpip.ErrNotConnected:
		cause = net.ErrClosed
	case *tcpip.ErrTimeout:
		cause = syscall.ETIMEDOUT
	default:
		cause = errors.New(err.String())
	}
	return &net.OpError{Op: op, Net: "tcp", Err: cause}
}

func wouldBlock(err tcpip.Error) bool {
	_, ok := err.(*tcpip.ErrWouldBlock)
	return ok
}

// Read implements net.Conn.
func (i *insideConn) Read(b []byte) (int, error) {
	for {
		n, err := i.tryRead(b)
		if !errors.Is(err, errWait) {
			return n, err
		}
		if err := i.waitRead(); err != nil {
			return 0, err
		}
	}
}

// errWait says that there are no bytes to read yet.
var errWait = errors.New("nothing to read yet")

// tryRead reads the available bytes, or fails with errWait.
func (i *insideConn) tryRead(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	w := tcpip.SliceWriter(b)
	return i.readTo(&w)
}

// readTo writes the available bytes to w, as many as it takes, or fails with errWait.
// If w takes none, the error comes from w, not from the connection.
func (i *insideConn) readTo(w io.Writer) (int, error) {
	if i.readBy.passed() {
		return 0, i.timeout("read")
	}
	result, err := i.endpoint.Read(w, tcpip.ReadOptions{})
	switch {
	case err == nil || result.Count > 0:
		return result.Count, nil
	case wouldBlock(err):
		return 0, errWait
	default:
		return 0, errorOf("read", err)
	}
}

func (i *insideConn) waitRead() error {
	select {
	case <-i.mayRead:
		return nil
	case <-i.readBy.done():
		return i.timeout("read")
	}
}

func (i *insideConn) timeout(op string) error {
	return &net.OpError{Op: op, Net: "tcp", Err: os.ErrDeadlineExceeded}
}

// Write implements net.Conn.
func (i *insideConn) Write(b []byte) (int, error) {
	var r bytes.Reader
	for done := 0; ; {
		if i.writeBy.passed() {
			return done, i.timeout("write")
		}
		if i.wasReset() {
			return done, errorOf("write", &tcpip.ErrAborted{})
		}
		r.Reset(b[done:])
		n, err := i.endpoint.Write(&r, tcpip.WriteOptions{})
		done += int(n)
		switch {
		case done == len(b):
			return done, nil
		case err == nil:
			continue
		case !wouldBlock(err):
			return done, errorOf("write", err)
		}
		select {
		case <-i.mayWrite:
		case <-i.writeBy.done():
			return done, i.timeout("write")
		}
	}
}

// CloseWrite implements Conn. A connection that is being reset needs no FIN.
func (i *insideConn) CloseWrite() error {
	if i.wasReset() {
		return nil
	}
	if err := i.endpoint.Shutdown(tcpip.ShutdownWrite); err != nil {
		return errorOf("close", err)
	}
	return nil
}

// Reset implements Conn. The RST may have to wait for room on the wire, and so may a
// goroutine that sends a segment of the connection, for as long as the sandbox does
// not read. Policies change meanwhile, so Reset does not wait.
func (i *insideConn) Reset() error {
	if i.reset.Swap(true) {
		return nil
	}
	w := i.c.w
	abort := func() {
		defer close(i.aborted)
		i.endpoint.Abort()
	}
	w.mu.Lock()
	spawned := w.spawn(abort)
	w.mu.Unlock()
	if !spawned {
		abort() // on a closed wire nothing waits for room
	}
	return nil
}

func (i *insideConn) wasReset() bool { return i.reset.Load() }

// settle returns once a Reset is complete.
func (i *insideConn) settle() {
	if i.wasReset() {
		<-i.aborted
	}
}

// Close implements net.Conn. Written data is still sent. If the sandbox has sent data
// that was not read, it gets a RST, as from Linux. After Reset it gets only the RST,
// and no FIN.
func (i *insideConn) Close() error {
	if i.closed.CompareAndSwap(false, true) {
		i.settle()
		i.endpoint.Close()
	}
	return nil
}

// linger closes the connection. It returns once the sandbox has acknowledged the rest
// and has closed its side, too. A program inside may read slowly, as long as its
// kernel answers. If the kernel is silent for Limits.Linger, the connection is reset.
func (i *insideConn) linger() {
	_ = i.Close() // it never fails
	expired := make(chan struct{}, 1)
	t := i.c.w.clock.AfterFunc(i.c.w.cfg.Limits.Linger, func() { expired <- struct{}{} })
	defer t.Stop()
	heard := i.segments()
	for !terminal(i.endpoint) {
		select {
		case <-i.mayRead:
		case <-i.mayWrite:
		case <-expired:
			n := i.segments()
			if n == heard {
				_ = i.Reset() // it never fails
				return
			}
			heard = n
			t.Reset(i.c.w.cfg.Limits.Linger)
		case <-i.c.ctx.Done():
			_ = i.Reset()
			return
		}
	}
}

// segments is how many segments of the connection the sandbox has sent.
func (i *insideConn) segments() uint64 {
	s, ok := i.endpoint.Stats().(*tcp.Stats)
	if !ok {
		return 0
	}
	return s.SegmentsReceived.Value()
}

// LocalAddr implements net.Conn: the address that the sandbox has connected to.
func (i *insideConn) LocalAddr() net.Addr { return net.TCPAddrFromAddrPort(i.c.tuple.Outside) }

// RemoteAddr implements net.Conn: the sandbox's address.
func (i *insideConn) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(i.c.tuple.Inside) }

// SetDeadline implements net.Conn.
func (i *insideConn) SetDeadline(t time.Time) error {
	i.readBy.set(t)
	i.writeBy.set(t)
	return nil
}

// SetReadDeadline implements net.Conn.
func (i *insideConn) SetReadDeadline(t time.Time) error {
	i.readBy.set(t)
	return nil
}

// SetWriteDeadline implements net.Conn.
func (i *insideConn) SetWriteDeadline(t time.Time) error {
	i.writeBy.set(t)
	return nil
}

// deadline is a deadline that goroutines can wait for. Until it is set it never
// passes. It moves by the time that its clock stands still, so that a paused sandbox
// is not late.
type deadline struct {
	clock tcpip.Clock

	// mu protects all following fields.
	mu    sync.Mutex
	timer tcpip.Timer
	// over is closed when the deadline passes. It is nil while no goroutine needs it.
	over chan struct{}
}

func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	if d.over != nil {
		select {
		case <-d.over:
			d.over = nil
		default:
		}
	}
	if t.IsZero() {
		// Goroutines that wait keep the channel, which is never closed now.
		return
	}
	if d.over == nil {
		d.over = make(chan struct{})
	}
	left := time.Until(t)
	if left <= 0 {
		close(d.over)
		return
	}
	var timer tcpip.Timer
	timer = d.clock.AfterFunc(left, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.timer == timer { // the deadline was not set again meanwhile
			close(d.over)
			d.timer = nil
		}
	})
	d.timer = timer
}

func (d *deadline) done() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.over == nil {
		// The channel is made here so that a deadline that is set later wakes the
		// waiting goroutine.
		d.over = make(chan struct{})
	}
	return d.over
}

func (d *deadline) passed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	select {
	case <-d.over:
		return true
	default:
		return false
	}
}
