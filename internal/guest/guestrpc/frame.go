package guestrpc

import (
	"encoding/binary"
	"errors"
	"io"
	"strconv"
)

// Channel is one of the byte streams inside a stream.
type Channel uint8

// The channels. File contents travel on stdin (to the guest) and stdout (to
// the host), watch events on control.
const (
	Stdin   Channel = 0
	Stdout  Channel = 1
	Stderr  Channel = 2
	Control Channel = 3

	channelCount = 4
)

// channelSet is a bit set of channels.
type channelSet uint8

func channels(list ...Channel) channelSet {
	var s channelSet
	for _, c := range list {
		s |= 1 << c
	}
	return s
}

func (s channelSet) has(c Channel) bool { return s&(1<<c) != 0 }

type frameType uint8

const (
	frameOpen    frameType = 1
	frameHeaders frameType = 2
	frameReply   frameType = 3
	frameData    frameType = 4
	frameWindow  frameType = 5
	frameEOF     frameType = 6
	frameReset   frameType = 7
	framePing    frameType = 8
	framePong    frameType = 9
	frameGoaway  frameType = 10
)

const (
	headerSize = 12

	// MaxPayload is the largest payload of a frame, and so of a message.
	MaxPayload = 64 << 10

	// minPayload is the lowest limit on frames that a peer may ask for.
	minPayload = 4 << 10

	pingSize   = 8
	windowSize = 4
)

type header struct {
	typ     frameType
	channel Channel
	stream  uint32
	length  uint32
}

func appendHeader(b []byte, h header) []byte {
	b = append(b, byte(h.typ), 0, byte(h.channel), 0)
	b = binary.LittleEndian.AppendUint32(b, h.stream)
	return binary.LittleEndian.AppendUint32(b, h.length)
}

// parseHeader checks everything about a header that does not depend on the
// state of the session.
func parseHeader(b []byte, maxPayload uint32) (header, error) {
	h := header{
		typ:     frameType(b[0]),
		channel: Channel(b[2]),
		stream:  binary.LittleEndian.Uint32(b[4:]),
		length:  binary.LittleEndian.Uint32(b[8:]),
	}
	if b[1] != 0 || b[3] != 0 {
		return h, violation("reserved header bytes are not 0")
	}
	if h.length > maxPayload {
		return h, violation("frame of " + strconv.Itoa(int(h.length)) + " bytes, the limit is " + strconv.Itoa(int(maxPayload)))
	}
	onStream, onChannel, size := true, false, -1
	switch h.typ {
	case frameOpen, frameHeaders, frameReply, frameReset:
	case frameData:
		onChannel = true
	case frameWindow:
		onChannel, size = true, windowSize
	case frameEOF:
		onChannel, size = true, 0
	case framePing, framePong:
		onStream, size = false, pingSize
	case frameGoaway:
		onStream = false
	default:
		return h, violation("unknown frame type " + strconv.Itoa(int(h.typ)))
	}
	switch {
	case h.channel >= channelCount || (!onChannel && h.channel != 0):
		return h, violation("bad channel " + strconv.Itoa(int(h.channel)))
	case onStream && h.stream&1 == 0:
		return h, violation("stream id " + strconv.Itoa(int(h.stream)) + " is not odd")
	case !onStream && h.stream != 0:
		return h, violation("session frame on a stream")
	case size >= 0 && h.length != uint32(size):
		return h, violation("frame of the wrong size for its type")
	}
	return h, nil
}

// idleBuffer is the read buffer of a session that carries no bulk data.
const idleBuffer = 4 << 10

// frameReader cuts a byte stream into frames. It reads ahead as far as its buffer
// allows. It holds 4 KiB, and takes a larger buffer for a frame that does not fit. It
// returns the larger buffer before it next waits, once its last frame was a small
// one.
type frameReader struct {
	r          io.Reader
	maxPayload uint32
	idle       []byte
	buf        []byte // idle, or a larger one
	start, end int    // unread part of buf
	lastLarge  bool
}

func newFrameReader(r io.Reader) *frameReader {
	f := new(frameReader)
	f.init(r, make([]byte, idleBuffer))
	return f
}

// init initialises a zero frameReader. idle has idleBuffer bytes.
func (f *frameReader) init(r io.Reader, idle []byte) {
	f.r, f.maxPayload, f.idle = r, MaxPayload, idle
	f.buf = f.idle
}

// next returns the next frame. The payload is valid until the next call. If the byte
// stream ends between two frames it returns io.EOF, and in the middle of a frame
// io.ErrUnexpectedEOF.
func (f *frameReader) next() (header, []byte, error) {
	b, err := f.take(headerSize)
	if err != nil {
		return header{}, nil, err
	}
	h, err := parseHeader(b, f.maxPayload)
	if err != nil {
		return h, nil, err
	}
	f.lastLarge = h.length > idleBuffer-headerSize
	p, err := f.take(int(h.length))
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return h, p, err
}

// take returns the next n bytes, which are valid until the next call.
func (f *frameReader) take(n int) ([]byte, error) {
	if f.end-f.start < n {
		f.makeRoom(n)
		for f.end-f.start < n {
			m, err := f.r.Read(f.buf[f.end:])
			if m < 0 || m > len(f.buf)-f.end {
				return nil, io.ErrNoProgress
			}
			f.end += m
			if m == 0 && err == nil {
				return nil, io.ErrNoProgress
			}
			if err != nil && f.end-f.start < n {
				if err == io.EOF && f.end > f.start {
					err = io.ErrUnexpectedEOF
				}
				return nil, err
			}
		}
	}
	b := f.buf[f.start : f.start+n]
	f.start += n
	return b, nil
}

// makeRoom makes the buffer large enough for n bytes from start on. Only a
// header or payload that is not complete yet is moved, so little is copied.
func (f *frameReader) makeRoom(n int) {
	rest := f.buf[f.start:f.end]
	switch {
	case n > len(f.buf):
		f.buf = make([]byte, headerSize+MaxPayload)
	case len(f.buf) > idleBuffer && !f.lastLarge && n <= idleBuffer && len(rest) <= idleBuffer:
		f.buf = f.idle
	}
	f.end = copy(f.buf, rest)
	f.start = 0
}
