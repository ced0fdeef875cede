package guestrpc

import (
	"io"
	"sync"
)

// maxPending bounds the frames that wait for the write turn; see the package
// documentation for why a correct peer stays far below it.
const maxPending = 64 << 10

// keepBuffer is the size up to which write buffers are kept for reuse. smallBuffer is
// the size of the first buffers, which is enough for a few answers.
const (
	keepBuffer  = 1 << 10
	smallBuffer = 64
)

var (
	errPendingFull = violation("it sends requests and does not read the answers")
	errNotWritten  = newError(CodeUnavailable, "connection closed")
)

// nonblockingWriter writes two slices one after the other, as far as it can without
// waiting. A short count without an error means that the peer has to read first.
type nonblockingWriter interface {
	tryWrite(a, b []byte) (int, error)
}

// frameWriter writes the frames of many goroutines to one connection, each frame in
// one piece.
type frameWriter struct {
	conn io.Writer
	try  nonblockingWriter // nil unless the connection is a socket; then &socket

	turn   chan struct{} // holds a token while a goroutine writes
	closed <-chan struct{}
	fail   func(error) // ends the session

	// Only the holder of the turn uses the following fields.
	head    [headerSize]byte
	scratch []byte

	mu      sync.Mutex // protects all following fields
	pending []byte
	spare   []byte // for reuse as pending

	// Part of this allocation, see session.init.
	socket socketWriter
	small  [2][smallBuffer]byte
}

// init initialises a zero frameWriter.
func (w *frameWriter) init(conn io.Writer, closed <-chan struct{}, fail func(error)) {
	w.conn, w.turn, w.closed, w.fail = conn, make(chan struct{}, 1), closed, fail
	if w.socket.init(conn) {
		w.try = &w.socket
	}
	w.pending, w.spare = w.small[0][:0], w.small[1][:0]
}

// acquire takes the write turn. It fails once cancel or the session is closed.
func (w *frameWriter) acquire(cancel <-chan struct{}) error {
	select {
	case w.turn <- struct{}{}:
		return nil
	default:
	}
	select {
	case w.turn <- struct{}{}:
		return nil
	case <-w.closed:
		return errNotWritten
	case <-cancel:
		return errCancelled
	}
}

// errCancelled is replaced by the error of the stream, which has the reason.
var errCancelled = newError(CodeAborted, "cancelled")

// write writes one frame. With a nil cancel it waits until the connection has
// taken all of it; otherwise it waits only for its turn.
func (w *frameWriter) write(cancel <-chan struct{}, h header, payload []byte) error {
	if err := w.acquire(cancel); err != nil {
		return err
	}
	return w.writeHoldingTurn(cancel, h, payload)
}

// writeHoldingTurn writes one frame and gives the turn back.
func (w *frameWriter) writeHoldingTurn(cancel <-chan struct{}, h header, payload []byte) error {
	h.length = uint32(len(payload))
	appendHeader(w.head[:0], h)
	head := w.head[:]
	if w.try != nil {
		n, err := w.try.tryWrite(head, payload)
		if err != nil {
			w.fail(err)
			w.release()
			return errNotWritten
		}
		if n >= headerSize {
			head, payload = nil, payload[n-headerSize:]
		} else {
			head = head[n:]
		}
	}
	if len(head)+len(payload) == 0 {
		w.release()
		return nil
	}
	if cancel != nil {
		rest := make([]byte, 0, len(head)+len(payload))
		rest = append(append(rest, head...), payload...)
		go w.finish(rest)
		return nil
	}
	if len(head) > 0 {
		w.scratch = append(append(w.scratch[:0], head...), payload...)
		payload = w.scratch
		if cap(w.scratch) > keepBuffer {
			w.scratch = nil
		}
	}
	_, err := w.conn.Write(payload)
	if err != nil {
		w.fail(err)
	}
	w.release()
	if err != nil {
		return errNotWritten
	}
	return nil
}

// finish writes the rest of a frame, for as long as that takes, and gives the turn
// back.
func (w *frameWriter) finish(rest []byte) {
	if _, err := w.conn.Write(rest); err != nil {
		w.fail(err)
	}
	w.release()
}

// release writes the pending frames and gives the turn back. It does not wait: if the
// connection is full, a goroutine keeps the turn and goes on.
func (w *frameWriter) release() {
	for {
		w.mu.Lock()
		if len(w.pending) == 0 {
			// The turn is given back under mu. So control either sees the turn free,
			// or has appended its frame before this check.
			<-w.turn
			w.mu.Unlock()
			return
		}
		p := w.pending
		w.pending, w.spare = w.spare[:0], nil
		w.mu.Unlock()

		n := 0
		if w.try != nil {
			var err error
			if n, err = w.try.tryWrite(p, nil); err != nil {
				w.fail(err)
				n = len(p)
			}
		}
		if n < len(p) {
			go w.finish(p[n:])
			return
		}
		if cap(p) <= keepBuffer {
			w.mu.Lock()
			w.spare = p[:0]
			w.mu.Unlock()
		}
	}
}

// control queues a frame and writes it at once if the turn is free. It never
// waits. The payload is copied.
func (w *frameWriter) control(h header, payload []byte) {
	h.length = uint32(len(payload))
	w.mu.Lock()
	if len(w.pending)+headerSize+len(payload) > maxPending {
		w.mu.Unlock()
		w.fail(errPendingFull)
		return
	}
	if w.pending == nil {
		w.pending, w.spare = w.spare, nil
	}
	w.pending = append(appendHeader(w.pending, h), payload...)
	w.mu.Unlock()
	select {
	case w.turn <- struct{}{}:
		w.release()
	default:
	}
}
