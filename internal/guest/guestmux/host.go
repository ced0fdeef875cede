package guestmux

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
)

// Host is the host's end.
type Host struct {
	m     *mux
	ready chan uint64 // epochs that the agent has confirmed
	done  chan struct{}

	lastID uint32 // protected by m.mu
}

// NewHost serves the host's end of a channel. The caller's next step is Reset.
func NewHost(ch io.ReadWriteCloser) *Host {
	h := &Host{m: newMux(ch), ready: make(chan uint64, 1), done: make(chan struct{})}
	go func() {
		defer close(h.done)
		_ = h.m.run(h.handle) // Err returns the reason for its end
	}()
	return h
}

func (h *Host) handle(k kind, epoch uint64, id uint32, payload []byte) error {
	switch k {
	case kindReady:
		h.m.mu.Lock()
		current := epoch == h.m.epoch
		h.m.mu.Unlock()
		if current {
			select {
			case h.ready <- epoch:
			default: // the agent has sent READY twice
			}
		}
		return nil
	case kindOpened:
		h.m.mu.Lock()
		s := h.m.streams[id]
		current := epoch == h.m.epoch
		h.m.mu.Unlock()
		if s != nil && current {
			s.mu.Lock()
			s.opened = true
			s.changed.Broadcast()
			s.mu.Unlock()
		}
		return nil
	case kindReset, kindOpen:
		return ErrViolation
	}
	return h.m.stream(k, epoch, id, payload)
}

// Reset makes the agent drop all streams, including those of another host, and waits
// until it has. epoch must be a number that no host of the sandbox, or of the
// sandboxes that it is a copy of, has used: a random number.
func (h *Host) Reset(ctx context.Context, epoch uint64) error {
	h.m.mu.Lock()
	h.m.epoch = epoch
	old := h.m.take()
	h.m.mu.Unlock()
	for _, s := range old {
		s.finish("")
	}
	if err := h.m.send(kindReset, epoch, 0, nil); err != nil {
		return err
	}
	for {
		select {
		case got := <-h.ready:
			if got == epoch {
				return nil
			}
		case <-h.done:
			return h.Err()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Open opens a stream to a port of the sandbox.
func (h *Host) Open(ctx context.Context, port uint32) (*Stream, error) {
	h.m.mu.Lock()
	if h.m.err != nil || len(h.m.streams) >= maxStreams {
		err := h.m.err
		h.m.mu.Unlock()
		if err == nil {
			err = errors.New("too many streams are open")
		}
		return nil, err
	}
	h.lastID++
	s := newStream(h.m, h.lastID, h.m.epoch)
	h.m.streams[s.id] = s
	h.m.mu.Unlock()
	if err := h.m.send(kindOpen, s.epoch, s.id, binary.LittleEndian.AppendUint32(nil, port)); err != nil {
		h.m.forget(s)
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	for !s.opened && !s.finished {
		s.changed.Wait()
	}
	switch {
	case s.opened:
		return s, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case s.reason != "":
		return nil, errors.New(s.reason)
	}
	return nil, ErrClosed
}

// Done is closed when the channel has ended.
func (h *Host) Done() <-chan struct{} { return h.done }

// Err returns why the channel ended, once it has ended.
func (h *Host) Err() error {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	return h.m.err
}

// Close ends the channel and all streams.
func (h *Host) Close() error {
	h.m.fail(ErrClosed)
	return nil
}
