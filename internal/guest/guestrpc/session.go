package guestrpc

import (
	"encoding/binary"
	"errors"
	"io"
	"strconv"
	"sync"
	"time"
)

// session is the part that both ends share once the hellos are exchanged: a read
// loop, a writer and a table of streams.
type session struct {
	conn    io.ReadWriteCloser
	r       frameReader
	w       frameWriter
	peer    hello
	version uint64
	window  uint32 // of each channel that we receive on

	// The functions in which the ends differ. onOpen is nil on the client.
	onOpen func(id uint32, payload []byte) error
	onPong func(token uint64)

	closed    chan struct{}
	closeOnce sync.Once
	err       error // the reason of its end; set before closed is closed

	mu      sync.Mutex // protects all following fields
	streams map[uint32]*stream
	lastID  uint32 // highest id opened so far
	goaway  *Error // the peer's GOAWAY, which asks for no more streams
}

func newSession(conn io.ReadWriteCloser, window uint32) *session {
	s := new(session)
	s.init(conn, window, make([]byte, idleBuffer))
	return s
}

// init initialises a zero session. The session is one allocation with its reader, its
// writer and their buffers, so that in a fork of the guest few pages change with it.
func (s *session) init(conn io.ReadWriteCloser, window uint32, idle []byte) {
	s.conn, s.window, s.closed, s.streams = conn, window, make(chan struct{}), make(map[uint32]*stream)
	s.r.init(conn, idle)
	s.w.init(conn, s.closed, s.fail)
}

// ourHello encodes this end's hello.
func (s *session) ourHello(capabilities []string) []byte {
	h := hello{minVersion: MinVersion, maxVersion: MaxVersion, maxPayload: MaxPayload, window: s.window, capabilities: capabilities}
	return h.append(nil)
}

// fail ends the session: err becomes the cause that every stream fails with.
// Only the first call counts.
func (s *session) fail(err error) {
	s.closeOnce.Do(func() {
		var pe *ProtocolError
		if errors.As(err, &pe) {
			s.sayGoaway(newError(CodeAborted, pe.Reason))
		}
		s.err = err
		close(s.closed)
		_ = s.conn.Close() // an error changes nothing now
		s.mu.Lock()
		streams := s.streams
		s.streams = nil
		s.mu.Unlock()
		for _, st := range streams {
			st.finish(s.lost())
		}
	})
}

// lost is the error of all calls once the session has ended.
func (s *session) lost() *Error {
	why := "connection to the guest lost: "
	if s.onOpen != nil {
		why = "connection to the host lost: "
	}
	cause := s.err
	s.mu.Lock()
	goaway := s.goaway
	s.mu.Unlock()
	switch {
	case goaway != nil:
		why += "peer said: " + goaway.Message
	case errors.Is(cause, io.EOF):
		why += "closed by peer"
	default:
		why += cause.Error()
	}
	return &Error{Code: CodeUnavailable, Message: why, cause: cause}
}

// goawayPatience is how long the end of a session waits for a frame that is being
// written, so that the peer learns the reason. A peer that does not read does not
// learn it.
const goawayPatience = time.Second

// sayGoaway tells the peer why the session ends. The holder of the write turn
// must not call it.
func (s *session) sayGoaway(e *Error) {
	if s.w.try == nil {
		return
	}
	patience := time.NewTimer(goawayPatience)
	defer patience.Stop()
	select {
	case s.w.turn <- struct{}{}:
	case <-patience.C:
		return
	}
	payload := appendError(nil, e)
	b := appendHeader(nil, header{typ: frameGoaway, length: uint32(len(payload))})
	// Best effort: the session ends whether or not the peer learns the reason.
	_, _ = s.w.try.tryWrite(b, payload)
	<-s.w.turn
}

// readLoop handles frames until the connection ends, and returns the reason.
func (s *session) readLoop() error {
	for {
		h, payload, err := s.r.next()
		if err == nil {
			err = s.handle(h, payload)
		}
		if err != nil {
			s.fail(err)
			return s.err
		}
	}
}

// handle handles one frame. It never waits. An error ends the session.
func (s *session) handle(h header, payload []byte) error {
	switch h.typ {
	case framePing:
		s.w.control(header{typ: framePong}, payload)
		return nil
	case framePong:
		if s.onPong != nil {
			s.onPong(binary.LittleEndian.Uint64(payload))
		}
		return nil
	case frameGoaway:
		e, err := decodeError(payload)
		if err != nil {
			return violation("GOAWAY: " + err.Error())
		}
		s.mu.Lock()
		s.goaway = e
		s.mu.Unlock()
		return nil
	case frameOpen:
		if s.onOpen == nil {
			return violation("the guest opened a stream")
		}
		return s.onOpen(h.stream, payload)
	}
	st, err := s.lookup(h.stream)
	if err != nil || st == nil {
		return err
	}
	return st.handle(h, payload)
}

// lookup returns the stream with an id. It returns nil for a forgotten stream, and an
// error for a stream that never existed.
func (s *session) lookup(id uint32) (*stream, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if id > s.lastID {
		return nil, violation("frame on stream " + strconv.Itoa(int(id)) + ", which was never opened")
	}
	return s.streams[id], nil
}

// forget removes a stream; later frames with its id are dropped.
func (s *session) forget(id uint32) {
	s.mu.Lock()
	delete(s.streams, id)
	s.mu.Unlock()
}

// reset tells the peer that a stream has ended with an error, without waiting.
func (s *session) reset(id uint32, e *Error) {
	s.w.control(header{typ: frameReset, stream: id}, appendError(nil, e))
}
