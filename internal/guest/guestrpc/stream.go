package guestrpc

import (
	"encoding/binary"
	"io"
	"sync"
)

// stream is one call, seen from either end.
type stream struct {
	s         *session
	id        uint32
	accept    channelSet // channels that the peer may send on
	streaming bool       // HEADERS comes before DATA and REPLY
	blocking  bool       // writes wait inside the system call: the agent's side

	done chan struct{} // closed when the stream has ended

	mu         sync.Mutex // protects all following fields
	cond       sync.Cond  // any of them changed
	in         [channelCount]inbound
	out        [channelCount]outbound
	gotHeaders bool
	headers    []byte
	reply      []byte
	ended      bool
	err        error  // why the stream ended; nil after REPLY
	onEnd      func() // called once the stream has ended; may be nil
}

// inbound holds the bytes of a channel that were received and not read yet.
type inbound struct {
	buf     []byte // unread from off on
	off     int
	credit  uint32 // bytes that the peer may still send
	unacked uint32 // bytes read and not yet returned to the peer's window
	eof     bool
}

// outbound is the sender's side of a channel.
type outbound struct {
	credit uint32 // bytes that we may still send
	eof    bool
}

func newStream(s *session, id uint32, accept channelSet) *stream {
	st := &stream{s: s, id: id, accept: accept, done: make(chan struct{})}
	st.cond.L = &st.mu
	for i := range st.in {
		st.in[i].credit = s.window
		st.out[i].credit = s.peer.window
	}
	return st
}

// handle handles one frame of this stream. It never waits.
func (st *stream) handle(h header, payload []byte) error {
	fromServer := st.s.onOpen == nil
	switch h.typ {
	case frameHeaders, frameReply:
		if !fromServer {
			return violation("the host sent a reply")
		}
		return st.onMessage(h.typ, payload)
	case frameReset:
		e, err := decodeError(payload)
		if err != nil {
			return violation("RESET: " + err.Error())
		}
		st.s.forget(st.id)
		st.finish(e)
		return nil
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.ended {
		return nil
	}
	switch h.typ {
	case frameData:
		if fromServer && !st.gotHeaders {
			return violation("DATA before HEADERS")
		}
		return st.onData(h.channel, payload)
	case frameEOF:
		if !st.accept.has(h.channel) || st.in[h.channel].eof {
			return violation("EOF on a channel that is closed or not used by the method")
		}
		st.in[h.channel].eof = true
	case frameWindow:
		n := binary.LittleEndian.Uint32(payload)
		o := &st.out[h.channel]
		if n == 0 || n > maxWindow || o.credit+n > 2*maxWindow {
			return violation("WINDOW of 0 or beyond the limit")
		}
		o.credit += n
	}
	st.cond.Broadcast()
	return nil
}

// onData stores received bytes. The window guarantees that they fit.
func (st *stream) onData(c Channel, payload []byte) error {
	in := &st.in[c]
	switch {
	case !st.accept.has(c):
		return violation("DATA on a channel that the method does not use")
	case in.eof:
		return violation("DATA after EOF")
	case uint32(len(payload)) > in.credit:
		return violation("DATA beyond the window")
	}
	in.credit -= uint32(len(payload))
	if in.off == len(in.buf) {
		in.off, in.buf = 0, in.buf[:0]
		if cap(in.buf) > idleBuffer && len(payload) < cap(in.buf)/8 {
			in.buf = nil // the bulk data is over
		}
	} else if in.off > 0 && len(in.buf)+len(payload) > cap(in.buf) {
		in.buf = in.buf[:copy(in.buf, in.buf[in.off:])]
		in.off = 0
	}
	in.buf = append(in.buf, payload...)
	st.cond.Broadcast()
	return nil
}

// onMessage takes HEADERS and REPLY on the client.
func (st *stream) onMessage(t frameType, payload []byte) error {
	st.mu.Lock()
	if st.ended {
		st.mu.Unlock()
		return nil
	}
	wantHeaders := st.streaming && !st.gotHeaders
	if wantHeaders != (t == frameHeaders) {
		st.mu.Unlock()
		return violation("HEADERS or REPLY out of order")
	}
	msg := append([]byte(nil), payload...)
	if t == frameHeaders {
		st.gotHeaders, st.headers = true, msg
		st.cond.Broadcast()
		st.mu.Unlock()
		return nil
	}
	st.reply = msg
	st.mu.Unlock()
	st.s.forget(st.id)
	st.finish(nil)
	return nil
}

// finish ends the stream on this end. Only the first call counts and returns true. It
// sends nothing. Received data can still be read.
func (st *stream) finish(err error) bool {
	st.mu.Lock()
	if st.ended {
		st.mu.Unlock()
		return false
	}
	st.ended, st.err = true, err
	onEnd := st.onEnd
	st.onEnd = nil
	close(st.done)
	st.cond.Broadcast()
	st.mu.Unlock()
	if onEnd != nil {
		onEnd()
	}
	return true
}

// abort ends the stream on both ends and drops received data.
func (st *stream) abort(err error) {
	st.s.forget(st.id) // before a waiting caller can see the end
	if !st.finish(err) {
		return
	}
	st.mu.Lock()
	for i := range st.in {
		st.in[i].buf, st.in[i].off = nil, 0
	}
	st.mu.Unlock()
	st.s.reset(st.id, errCancelled)
}

// read reads from a channel and waits for data. After a failure it first returns the
// data that came before.
func (st *stream) read(c Channel, p []byte) (int, error) {
	st.mu.Lock()
	in := &st.in[c]
	for in.off == len(in.buf) {
		switch {
		case st.err != nil:
			err := st.err
			st.mu.Unlock()
			return 0, err
		case in.eof || st.ended:
			st.mu.Unlock()
			return 0, io.EOF
		case len(p) == 0:
			st.mu.Unlock()
			return 0, nil
		}
		st.cond.Wait()
	}
	n := copy(p, in.buf[in.off:])
	in.off += n
	in.unacked += uint32(n)
	grant := uint32(0)
	if in.unacked >= st.s.window/2 && !st.ended && !in.eof {
		grant, in.unacked = in.unacked, 0
		in.credit += grant
	}
	st.mu.Unlock()
	if grant > 0 {
		var b [windowSize]byte
		binary.LittleEndian.PutUint32(b[:], grant)
		st.s.w.control(header{typ: frameWindow, channel: c, stream: st.id}, b[:])
	}
	return n, nil
}

// write sends p on a channel, waiting for window.
func (st *stream) write(c Channel, p []byte) (int, error) {
	sent := 0
	for sent < len(p) {
		n, err := st.reserve(c, len(p)-sent)
		if err != nil {
			return sent, err
		}
		if err := st.send(header{typ: frameData, channel: c}, p[sent:sent+n]); err != nil {
			return sent, err
		}
		sent += n
	}
	return sent, nil
}

// reserve waits until the window of a channel is open and takes up to want
// bytes from it.
func (st *stream) reserve(c Channel, want int) (int, error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	o := &st.out[c]
	for {
		switch {
		case st.err != nil:
			return 0, st.err
		case st.ended || o.eof:
			return 0, io.ErrClosedPipe
		case o.credit > 0:
			n := min(uint64(want), uint64(o.credit), uint64(st.s.peer.maxPayload))
			o.credit -= uint32(n)
			return int(n), nil
		}
		st.cond.Wait()
	}
}

// closeWrite tells the peer that no more data will come on a channel.
func (st *stream) closeWrite(c Channel) error {
	st.mu.Lock()
	o := &st.out[c]
	if o.eof || st.ended {
		st.mu.Unlock()
		return nil
	}
	o.eof = true
	st.cond.Broadcast()
	st.mu.Unlock()
	return st.send(header{typ: frameEOF, channel: c}, nil)
}

// send writes one frame of this stream.
func (st *stream) send(h header, payload []byte) error {
	h.stream = st.id
	cancel := st.done
	if st.blocking {
		cancel = nil
	}
	err := st.s.w.write(cancel, h, payload)
	if err == nil {
		return nil
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	switch {
	case st.err != nil:
		return st.err
	case st.ended:
		return io.ErrClosedPipe
	}
	return err
}

// waitHeaders waits for HEADERS.
func (st *stream) waitHeaders() ([]byte, error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for !st.gotHeaders && !st.ended {
		st.cond.Wait()
	}
	if !st.gotHeaders {
		return nil, st.err
	}
	return st.headers, nil
}

// waitReply waits for the end of the call.
func (st *stream) waitReply() ([]byte, error) {
	<-st.done
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.reply, st.err
}
