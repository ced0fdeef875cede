package egress

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"agentrun.dev/internal/network/stack"
)

// endable is the sandbox's connection. It can be made to look as if the sandbox had
// sent all of its requests.
type endable struct {
	stack.Conn

	mu    sync.Mutex
	ended bool // mu protects it and all following fields: no more requests are wanted
	// answered is set while no request is under way: from its answer until the server
	// waits for the next request.
	answered bool
	late     bool          // the read deadline has passed
	woken    chan struct{} // closed when a waiting read has to return
}

var past = time.Unix(1, 0)

// Read hides the end of the sandbox's stream while a request is served. Otherwise the
// server would conclude that the sandbox has gone, and give the request up. The
// server checks for that with reads of one byte, which it ends by a deadline in the
// past.
func (e *endable) Read(b []byte) (int, error) {
	n, err := e.Conn.Read(b)
	if len(b) != 1 || !errors.Is(err, io.EOF) {
		return n, err
	}
	e.mu.Lock()
	if e.answered {
		e.mu.Unlock()
		return n, err
	}
	if e.late {
		e.mu.Unlock()
		return 0, os.ErrDeadlineExceeded
	}
	woken := make(chan struct{})
	e.woken = woken
	e.mu.Unlock()
	<-woken
	return 0, os.ErrDeadlineExceeded
}

// answer records that a request was answered. From now on the end of the stream may
// be seen.
func (e *endable) answer() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.answered = true
	e.wake()
}

// end makes the server's next read fail.
func (e *endable) end() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ended, e.late = true, true
	e.wake()
	_ = e.Conn.SetReadDeadline(past)
}

// Close also ends a waiting read.
func (e *endable) Close() error {
	e.mu.Lock()
	e.late = true
	e.wake()
	e.mu.Unlock()
	return e.Conn.Close()
}

// wake ends a waiting read. The caller holds e.mu.
func (e *endable) wake() {
	if e.woken != nil {
		close(e.woken)
		e.woken = nil
	}
}

// SetReadDeadline is called by the server before it reads. Only a deadline in the
// future announces the next request.
func (e *endable) SetReadDeadline(t time.Time) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ended {
		t = past
	}
	e.late = !t.IsZero() && !t.After(time.Now())
	if e.late {
		e.wake()
	} else if !t.IsZero() {
		e.answered = false
	}
	return e.Conn.SetReadDeadline(t)
}

// SetDeadline is called by the server when a request takes the connection over.
func (e *endable) SetDeadline(t time.Time) error {
	return errors.Join(e.SetReadDeadline(t), e.SetWriteDeadline(t))
}

// watched is the connection to the server. It reports its end to the exchange.
type watched struct {
	*outside
	exchange *exchange
	once     sync.Once
}

func (w *watched) Read(b []byte) (int, error) {
	n, err := w.outside.Read(b)
	if err != nil {
		w.once.Do(func() { w.exchange.remoteEnded(err) })
	}
	return n, err
}

// Close is called by the transport when it cannot parse the connection any more, for
// example after unsolicited bytes.
func (w *watched) Close() error {
	err := w.outside.Close()
	w.once.Do(func() { w.exchange.remoteEnded(net.ErrClosed) })
	return err
}

// oneListener accepts one connection, and then blocks until it is closed.
type oneListener struct {
	conn   chan net.Conn
	closed chan struct{}
	once   sync.Once
	addr   net.Addr
}

func newOneListener(conn net.Conn) *oneListener {
	l := &oneListener{conn: make(chan net.Conn, 1), closed: make(chan struct{}), addr: conn.LocalAddr()}
	l.conn <- conn
	return l
}

func (l *oneListener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.conn:
		return conn, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *oneListener) Close() error   { l.once.Do(func() { close(l.closed) }); return nil }
func (l *oneListener) Addr() net.Addr { return l.addr }
