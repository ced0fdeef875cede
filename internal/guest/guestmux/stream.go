package guestmux

import (
	"encoding/binary"
	"io"
	"sync"
)

// Stream is one connection. One goroutine may read and one may write at a time. The
// other methods may be called from any goroutine.
type Stream struct {
	m     *mux
	id    uint32
	epoch uint64

	mu       sync.Mutex // protects all following fields
	changed  sync.Cond
	opened   bool
	in       []byte // received and not yet read
	owed     uint32 // bytes read, and not yet returned to the sender's window
	credit   uint32 // bytes that we may still send
	sentEnd  bool
	inEnd    bool // the other end will send no more data
	finished bool // closed, aborted, or the channel is gone
	reason   string
}

func newStream(m *mux, id uint32, epoch uint64) *Stream {
	s := &Stream{m: m, id: id, epoch: epoch, credit: window}
	s.changed.L = &s.mu
	return s
}

// Read implements io.Reader. It returns io.EOF once the other end has closed the
// stream.
func (s *Stream) Read(p []byte) (int, error) {
	s.mu.Lock()
	for len(s.in) == 0 && !s.inEnd && !s.finished {
		s.changed.Wait()
	}
	n := copy(p, s.in)
	s.in = s.in[n:]
	if len(s.in) == 0 {
		s.in = nil
	}
	s.owed += uint32(n)
	give := uint32(0)
	if s.owed >= window/2 && !s.finished && !s.inEnd {
		give, s.owed = s.owed, 0
	}
	s.mu.Unlock()
	if give > 0 {
		// An error ends the channel, and the next call returns it.
		_ = s.m.send(kindWindow, s.epoch, s.id, binary.LittleEndian.AppendUint32(nil, give))
	}
	if n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}

// Write implements io.Writer.
func (s *Stream) Write(p []byte) (int, error) {
	written := 0
	for written < len(p) {
		n, err := s.reserve(len(p) - written)
		if err == nil {
			err = s.m.send(kindData, s.epoch, s.id, p[written:written+n])
		}
		if err != nil {
			return written, err
		}
		written += n
	}
	return written, nil
}

// reserve waits for room in the other end's window.
func (s *Stream) reserve(want int) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.credit == 0 && !s.finished && !s.sentEnd {
		s.changed.Wait()
	}
	if s.finished || s.sentEnd {
		return 0, ErrClosed
	}
	n := min(want, int(s.credit), MaxPayload)
	s.credit -= uint32(n)
	return n, nil
}

// CloseWrite tells the other end that no more data will come.
func (s *Stream) CloseWrite() error {
	s.mu.Lock()
	if s.finished || s.sentEnd {
		s.mu.Unlock()
		return nil
	}
	s.sentEnd = true
	s.changed.Broadcast()
	s.mu.Unlock()
	return s.m.send(kindEnd, s.epoch, s.id, nil)
}

// Close ends the stream; calls under way return.
func (s *Stream) Close() error { return s.abort("") }

// abort ends the stream and tells the other end why.
func (s *Stream) abort(reason string) error {
	s.mu.Lock()
	tell := !s.finished && !(s.sentEnd && s.inEnd)
	s.finished = true
	s.changed.Broadcast()
	s.mu.Unlock()
	s.m.forget(s)
	if !tell {
		return nil
	}
	return s.m.send(kindAbort, s.epoch, s.id, []byte(reason[:min(len(reason), maxReason)]))
}

// finish marks the stream as gone.
func (s *Stream) finish(reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.finished {
		s.finished, s.reason = true, reason
		s.changed.Broadcast()
	}
}

func (s *Stream) received(p []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.inEnd {
		return ErrViolation
	}
	if s.finished {
		return nil
	}
	if uint64(len(s.in))+uint64(s.owed)+uint64(len(p)) > window {
		return ErrViolation
	}
	s.in = append(s.in, p...)
	s.changed.Broadcast()
	return nil
}

func (s *Stream) credited(n uint32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if uint64(s.credit)+uint64(n) > window {
		return ErrViolation
	}
	s.credit += n
	s.changed.Broadcast()
	return nil
}

func (s *Stream) peerEnded() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inEnd = true
	s.changed.Broadcast()
}
