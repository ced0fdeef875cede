// Package protocol is the protocol between the testbed's client on the host and its
// server inside the VM, over one virtio-serial port.
//
// A serial port has no connections: a client killed half-way through a frame leaves
// its bytes behind for the next one. So every client begins with a greeting that
// works from any state of the parser. First come zeros, as long as the longest frame.
// The frame that was cut off swallows them; then a zero header is invalid, and the
// server starts hunting for a magic. Next come the magic and a nonce. The server ends
// the previous session and answers with the nonce. The client drops all bytes up to
// that answer.
package protocol

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Version changes with every incompatible change of the protocol: a VM
// outlives the binary that started it.
const Version = 1

// Type is the kind of a frame's payload.
type Type uint8

// The frames of a client.
const (
	StartPart Type = iota + 1 // a piece of the JSON form of Start
	Begin                     // the Start is complete
	Stdin                     // bytes for stdin, never more than Window unacknowledged
	StdinEOF                  // the end of stdin
	Signal                    // one byte: the signal's number
	Resize                    // two uint16: rows, columns
	PowerOff                  // end the machine
)

// The frames of the server.
const (
	Stdout   Type = iota + 64 // bytes
	Stderr                    // bytes
	StdinAck                  // uint32: bytes of stdin taken by the process
	Exit                      // uint32: the exit code; the last frame of a session
	Failed                    // text: why the command could not be started; the last frame
)

const (
	headerSize = 8

	// MaxPayload bounds a frame in both directions. It is small because a
	// greeting sends this many zeros, and large enough for virtio-serial,
	// which moves 32 KiB at once.
	MaxPayload = 32<<10 - headerSize

	// Window is how much stdin may be on its way to a process that does not read.
	// Without it the server would block on the process's pipe and notice neither
	// signals nor the end of the client.
	Window = 256 << 10

	// MaxStart bounds the JSON form of Start.
	MaxStart = 4 << 20
)

// Start describes the command to run.
type Start struct {
	Argv    []string `json:"argv"`
	Env     []string `json:"env"`
	Workdir string   `json:"dir"`
	TTY     bool     `json:"tty,omitempty"`
	Rows    uint16   `json:"rows,omitempty"`
	Cols    uint16   `json:"cols,omitempty"`
}

var (
	helloMagic = [16]byte{0x00, 0xff, 'a', 'g', 'e', 'n', 't', 'r', 'u', 'n', ' ', 'h', 'e', 'l', 'o', 0xfe}
	ackMagic   = [16]byte{0x00, 0xff, 'a', 'g', 'e', 'n', 't', 'r', 'u', 'n', ' ', 'a', 'c', 'k', '.', 0xfe}
)

// Frame headers contain two fixed bytes, so that a parser that lost its place notices
// at once.
const (
	mark0 = 'A'
	mark1 = 'T'
)

// ErrResync is returned by ReadFrame when the bytes are not a frame: a new
// client is greeting, and ReadHello finds it.
var ErrResync = errors.New("not a frame")

// AppendFrame appends a frame to b.
func AppendFrame(b []byte, t Type, payload []byte) []byte {
	if len(payload) > MaxPayload {
		panic(fmt.Sprintf("protocol: frame of %d bytes", len(payload)))
	}
	b = append(b, mark0, mark1, byte(t), 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(payload)))
	return append(b, payload...)
}

// ReadFrame reads one frame; the payload is in buf (MaxPayload long) and valid
// until the next call.
func ReadFrame(r io.Reader, buf []byte) (Type, []byte, error) {
	var h [headerSize]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return 0, nil, err
	}
	n := binary.LittleEndian.Uint32(h[4:])
	if h[0] != mark0 || h[1] != mark1 || h[3] != 0 || n > MaxPayload {
		return 0, nil, ErrResync
	}
	if _, err := io.ReadFull(r, buf[:n]); err != nil {
		return 0, nil, err
	}
	return Type(h[2]), buf[:n], nil
}

// Nonce distinguishes the greetings of clients.
type Nonce [16]byte

// NewNonce returns a random nonce.
func NewNonce() Nonce {
	var n Nonce
	rand.Read(n[:]) // never fails: crypto/rand ends the program instead
	return n
}

// Hello is the greeting for a nonce.
func Hello(n Nonce) []byte {
	b := make([]byte, headerSize+MaxPayload, headerSize+MaxPayload+36)
	b = append(b, helloMagic[:]...)
	b = append(b, n[:]...)
	return binary.LittleEndian.AppendUint32(b, Version)
}

// ReadHello drops bytes until it has read a greeting.
func ReadHello(r io.ByteReader) (Nonce, uint32, error) {
	if err := hunt(r, helloMagic[:]); err != nil {
		return Nonce{}, 0, err
	}
	return readNonce(r)
}

// Ack is the server's answer to a greeting.
func Ack(n Nonce) []byte {
	b := append([]byte(nil), ackMagic[:]...)
	b = append(b, n[:]...)
	return binary.LittleEndian.AppendUint32(b, Version)
}

// ReadAck drops bytes until it has read the answer to this nonce, and returns
// the server's version.
func ReadAck(r io.ByteReader, want Nonce) (uint32, error) {
	for {
		if err := hunt(r, ackMagic[:]); err != nil {
			return 0, err
		}
		got, version, err := readNonce(r)
		if err != nil || got == want {
			return version, err
		}
	}
}

// hunt reads up to and including pattern. The patterns' first byte occurs only
// there, so a mismatch can start over at the current byte.
func hunt(r io.ByteReader, pattern []byte) error {
	for n := 0; n < len(pattern); {
		c, err := r.ReadByte()
		if err != nil {
			return err
		}
		switch c {
		case pattern[n]:
			n++
		case pattern[0]:
			n = 1
		default:
			n = 0
		}
	}
	return nil
}

func readNonce(r io.ByteReader) (Nonce, uint32, error) {
	var b [20]byte
	for i := range b {
		c, err := r.ReadByte()
		if err != nil {
			return Nonce{}, 0, err
		}
		b[i] = c
	}
	return Nonce(b[:16]), binary.LittleEndian.Uint32(b[16:]), nil
}

// Uint32 is the payload of StdinAck and Exit.
func Uint32(v uint32) []byte { return binary.LittleEndian.AppendUint32(nil, v) }

// ParseUint32 is the reverse of Uint32.
func ParseUint32(p []byte) (uint32, error) {
	if len(p) != 4 {
		return 0, fmt.Errorf("number of %d bytes", len(p))
	}
	return binary.LittleEndian.Uint32(p), nil
}

// Size is the payload of Resize.
func Size(rows, cols uint16) []byte {
	return binary.LittleEndian.AppendUint16(binary.LittleEndian.AppendUint16(nil, rows), cols)
}

// ParseSize is the reverse of Size.
func ParseSize(p []byte) (rows, cols uint16, err error) {
	if len(p) != 4 {
		return 0, 0, fmt.Errorf("size of %d bytes", len(p))
	}
	return binary.LittleEndian.Uint16(p), binary.LittleEndian.Uint16(p[2:]), nil
}

// Chunks calls f for each piece of p that fits a frame.
func Chunks(p []byte, f func([]byte) error) error {
	for r := bytes.NewBuffer(p); r.Len() > 0; {
		if err := f(r.Next(MaxPayload)); err != nil {
			return err
		}
	}
	return nil
}
