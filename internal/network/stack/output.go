package stack

import (
	"errors"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// maxAnswers bounds the handmade answers that wait for room on a wire.
const maxAnswers = 64

// output is the sending half of a wire.
type output struct {
	// mu protects all following fields. It is held no longer than it takes to copy a
	// message into the socket.
	mu sync.Mutex
	// room is signalled when the socket may have room.
	room   sync.Cond
	closed bool
	// waiting is how many goroutines wait for room.
	waiting int
	// answers are messages that are sent first. inherited are connections whose
	// unexpected ACKs are sent after them.
	answers   [][]byte
	inherited []Tuple
}

func (o *output) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	o.answers, o.inherited = nil, nil
	o.room.Broadcast()
}

// writable sends waiting messages. The poller calls it when there is room again.
func (w *Wire) writable() {
	w.tx.mu.Lock()
	defer w.tx.mu.Unlock()
	if w.flush() {
		w.tx.room.Signal()
	}
}

// flush sends the messages that wait without a goroutine, and reports whether all
// were sent. The caller holds tx.mu.
func (w *Wire) flush() bool {
	for len(w.tx.answers) > 0 {
		if !w.try(vectorsOf(w.tx.answers[0]), len(w.tx.answers[0])) {
			return false
		}
		w.tx.answers = w.tx.answers[1:]
	}
	w.tx.answers = nil
	for len(w.tx.inherited) > 0 {
		// One of the two sequence numbers is outside of any window: windows are
		// smaller than 2³⁰ (RFC 7323 §2.3).
		for _, sequence := range []uint32{0, 1 << 31} {
			m := w.strayACK(w.tx.inherited[0], sequence)
			if !w.try(vectorsOf(m), len(m)) {
				return false
			}
		}
		w.tx.inherited = w.tx.inherited[1:]
	}
	w.tx.inherited = nil
	return true
}

func vectorsOf(b []byte) []unix.Iovec {
	v := []unix.Iovec{{Base: &b[0]}}
	v[0].SetLen(len(b))
	return v
}

// try sends one message of n bytes. If there is no room, it reports false and makes
// the poller call writable later. The caller holds tx.mu.
func (w *Wire) try(vectors []unix.Iovec, n int) bool {
	if w.tx.closed {
		return true
	}
	err := sendMessage(w.fd, vectors)
	switch {
	case err == nil:
		w.counters.framesOut.Add(1)
		w.counters.bytesOut.Add(uint64(n))
		return true
	case errors.Is(err, unix.EAGAIN):
		w.armWriters()
		return false
	case errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.ENOMEM):
		w.drop(DropFull) // the host is out of memory, and epoll does not report when it has some again
		return true
	default:
		w.drop(DropGone)
		return true
	}
}

// answer sends a handmade message. It never waits.
func (w *Wire) answer(message []byte) {
	w.down.take(len(message))
	w.tx.mu.Lock()
	defer w.tx.mu.Unlock()
	if w.tx.closed || w.flush() && w.try(vectorsOf(message), len(message)) {
		return
	}
	if len(w.tx.answers) >= maxAnswers {
		w.drop(DropFull)
		return
	}
	w.tx.answers = append(w.tx.answers, message)
}

// transmit sends a message of n bytes, and waits for room and for the sandbox's rate.
func (w *Wire) transmit(vectors []unix.Iovec, n int) {
	if d := w.down.take(n); d > 0 {
		w.wait(d)
	}
	w.tx.mu.Lock()
	defer w.tx.mu.Unlock()
	for !w.tx.closed && (!w.flush() || !w.try(vectors, n)) {
		w.tx.waiting++
		w.tx.room.Wait()
		w.tx.waiting--
	}
	// Waiting goroutines are woken one by one, as each finds room.
	if w.tx.waiting > 0 {
		w.tx.room.Signal()
	}
}

// wait waits until d has passed on the sandbox's clock, or w is closed.
func (w *Wire) wait(d time.Duration) {
	passed := make(chan struct{})
	t := w.clock.AfterFunc(d, func() { close(passed) })
	defer t.Stop()
	select {
	case <-passed:
	case <-w.ctx.Done():
	}
}
