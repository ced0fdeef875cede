// Package guestmux carries many streams over one socket that preserves message
// boundaries (SOCK_SEQPACKET). It is the channel to the agent of a sandbox without
// vsock. The host opens streams, the agent accepts them.
//
// # Messages
//
// A header of 13 bytes, little endian, and a payload of at most 32 KiB:
//
//	offset  size  field
//	0       1     type
//	1       8     epoch
//	9       4     stream; 0 for RESET and READY
//
//	type      from   payload       meaning
//	1 RESET   host   none          forget all streams; this is the epoch from now on
//	2 READY   agent  none          done
//	3 OPEN    host   port, 4 bytes a new stream; ids are never used twice in an epoch
//	4 OPENED  agent  none          it is accepted
//	5 DATA    both   bytes         uses up the receiver's window
//	6 WINDOW  both   4 bytes       the receiver takes that many more
//	7 END     both   none          no more DATA from here
//	8 ABORT   both   text          the stream is gone; refused, if it was not open yet
//
// # Epochs
//
// A copy of a sandbox continues wherever its agent was: the agent may send messages
// that were meant for the source's host, and it has that host's streams. Messages
// arrive whole or not at all, and messages of another epoch are dropped. So the host
// of a copy sends RESET with a random epoch, and all messages after READY belong to
// it. The source and its streams are not affected.
//
// # Waiting
//
// Each stream has a window of 256 KiB per direction, so that a stream that is not
// read delays no other. The read loop never writes, and so always reads; hence the
// other end's writes make progress.
//
// Nothing here uses reflection, net or fmt, because the agent links this package.
package guestmux

import (
	"encoding/binary"
	"errors"
	"io"
	"sync"
)

const (
	headerSize = 13
	// MaxPayload bounds a message.
	MaxPayload = 32 << 10
	// window is how many bytes an end may send on a stream before the other end has
	// read any.
	window = 256 << 10
	// maxStreams bounds the open streams.
	maxStreams = 1024
	// maxReason bounds the text of an ABORT.
	maxReason = 256
)

type kind uint8

const (
	kindReset kind = iota + 1
	kindReady
	kindOpen
	kindOpened
	kindData
	kindWindow
	kindEnd
	kindAbort
)

// Errors of streams and of whole channels.
var (
	// ErrClosed says that the stream was closed, by either end.
	ErrClosed = errors.New("stream closed")
	// ErrViolation says that the other end violated the protocol.
	ErrViolation = errors.New("the other end of the channel broke the protocol")
)

// mux is the part that both ends share.
type mux struct {
	ch io.ReadWriteCloser

	sending sync.Mutex // one message at a time; protects out
	out     []byte

	mu      sync.Mutex // protects all following fields
	epoch   uint64
	streams map[uint32]*Stream
	err     error // why the channel ended
}

func newMux(ch io.ReadWriteCloser) *mux {
	return &mux{ch: ch, streams: map[uint32]*Stream{}, out: make([]byte, 0, headerSize+64)}
}

// send writes one message and waits for room. The read loop must not call it.
func (m *mux) send(k kind, epoch uint64, stream uint32, payload []byte) error {
	m.sending.Lock()
	defer m.sending.Unlock()
	b := m.out[:0]
	b = append(b, byte(k))
	b = binary.LittleEndian.AppendUint64(b, epoch)
	b = binary.LittleEndian.AppendUint32(b, stream)
	b = append(b, payload...)
	if cap(b) <= MaxPayload+headerSize {
		m.out = b
	}
	_, err := m.ch.Write(b)
	return err
}

// run reads messages until the channel ends, and returns the reason.
func (m *mux) run(handle func(k kind, epoch uint64, stream uint32, payload []byte) error) error {
	buf := make([]byte, headerSize+MaxPayload)
	for {
		n, err := m.ch.Read(buf)
		if err == nil && n < headerSize {
			err = ErrViolation
		}
		if err == nil {
			err = handle(kind(buf[0]), binary.LittleEndian.Uint64(buf[1:]), binary.LittleEndian.Uint32(buf[9:]), buf[headerSize:n])
		}
		if err != nil {
			m.fail(err)
			return err
		}
	}
}

// fail ends the channel and all streams.
func (m *mux) fail(err error) {
	m.mu.Lock()
	if m.err == nil {
		m.err = err
	}
	old := m.take()
	m.mu.Unlock()
	_ = m.ch.Close() // a read or write under way returns
	for _, s := range old {
		s.finish("")
	}
}

// take removes and returns all streams. The caller holds m.mu.
func (m *mux) take() map[uint32]*Stream {
	old := m.streams
	m.streams = map[uint32]*Stream{}
	return old
}

func (m *mux) forget(s *Stream) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.streams[s.id] == s {
		delete(m.streams, s.id)
	}
}

// stream handles the messages that both ends understand. A message for an unknown
// stream was sent before the other end learned of the stream's end, so it is dropped.
func (m *mux) stream(k kind, epoch uint64, id uint32, payload []byte) error {
	m.mu.Lock()
	s := m.streams[id]
	current := epoch == m.epoch
	m.mu.Unlock()
	if s == nil || !current {
		return nil
	}
	switch k {
	case kindData:
		return s.received(payload)
	case kindWindow:
		if len(payload) != 4 {
			return ErrViolation
		}
		return s.credited(binary.LittleEndian.Uint32(payload))
	case kindEnd:
		s.peerEnded()
	case kindAbort:
		m.forget(s)
		s.finish(string(payload[:min(len(payload), maxReason)]))
	default:
		return ErrViolation
	}
	return nil
}
