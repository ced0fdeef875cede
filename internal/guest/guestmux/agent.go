package guestmux

import (
	"encoding/binary"
	"io"
)

// Serve is the agent's end. It accepts streams until the channel ends. It calls
// accept in a goroutine of its own. With a nil error accept accepts the stream, and
// returns serve, which is then called and owns the stream.
func Serve(ch io.ReadWriteCloser, accept func(port uint32) (serve func(*Stream), err error)) error {
	m := newMux(ch)
	return m.run(func(k kind, epoch uint64, id uint32, payload []byte) error {
		switch k {
		case kindReset:
			m.mu.Lock()
			m.epoch = epoch
			old := m.take()
			m.mu.Unlock()
			for _, s := range old {
				s.finish("")
			}
			go func() { _ = m.send(kindReady, epoch, 0, nil) }() // a failing channel ends by itself
			return nil
		case kindOpen:
			if len(payload) != 4 {
				return ErrViolation
			}
			m.open(epoch, id, binary.LittleEndian.Uint32(payload), accept)
			return nil
		case kindReady, kindOpened:
			return ErrViolation
		}
		return m.stream(k, epoch, id, payload)
	})
}

// open begins a stream that the host has asked for.
func (m *mux) open(epoch uint64, id, port uint32, accept func(uint32) (func(*Stream), error)) {
	s := newStream(m, id, epoch)
	m.mu.Lock()
	ok := epoch == m.epoch
	full := len(m.streams) >= maxStreams
	if ok && !full {
		m.streams[id] = s
	}
	m.mu.Unlock()
	if !ok {
		return
	}
	go func() {
		if full {
			_ = s.abort("too many streams are open") // a failing channel ends by itself
			return
		}
		serve, err := accept(port)
		if err != nil {
			_ = s.abort(err.Error())
			return
		}
		if m.send(kindOpened, epoch, id, nil) != nil {
			s.finish("")
		}
		serve(s)
	}()
}
