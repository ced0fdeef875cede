// Package codec is a bounded binary codec for data that crosses a trust
// boundary: RPC messages between host and guest, and saved device state.
//
// # Encoding
//
// A value has exactly one encoding. So equal values have equal bytes, and a
// checksum over the bytes identifies the value:
//
//	uvarint  base-128, little endian, minimal length (a redundant zero byte is an error)
//	varint   zig-zag, then uvarint
//	bool     one byte, 0 or 1
//	bytes    uvarint length, then the bytes
//	string   as bytes
//	strings  uvarint count, then each string
//
// # Growing a message
//
// A message starts with its version, a uvarint of at least 1. Version N+1 may
// only append fields after those of version N. A reader that knows version K
// decodes the fields of min(version, K); missing fields keep their zero value.
// If the writer is newer, the reader ignores the bytes that follow; otherwise
// trailing bytes are an error. A message nested in another is written as bytes,
// so that an older reader can skip its unknown fields.
//
// # Limits
//
// Every length is checked against the rest of the input and against a limit
// given by the caller before memory is allocated. A list of strings needs at
// most one string header per input byte, and no more than its limit.
package codec

import (
	"encoding/binary"
	"errors"
)

// Errors of decoding. They are wrapped in a *DecodeError.
var (
	ErrTruncated = errors.New("input ends in the middle of a value")
	ErrTooLong   = errors.New("length exceeds its limit")
	ErrNotMin    = errors.New("number is not encoded in its shortest form")
	ErrOverflow  = errors.New("number does not fit in 64 bits")
	ErrBool      = errors.New("bool is neither 0 nor 1")
	ErrRange     = errors.New("number exceeds its limit")
	ErrTrailing  = errors.New("bytes left after the last field")
	ErrVersion   = errors.New("message version 0 does not exist")
)

// DecodeError says where in the input decoding failed.
type DecodeError struct {
	Offset int
	Err    error
}

func (e *DecodeError) Error() string {
	return "decode at byte " + itoa(e.Offset) + ": " + e.Err.Error()
}

func (e *DecodeError) Unwrap() error { return e.Err }

// itoa keeps strconv's tables out of small binaries; offsets are never negative.
func itoa(n int) string {
	var b [20]byte
	i := len(b)
	for {
		i--
		b[i] = byte('0' + n%10)
		n /= 10
		if n == 0 {
			return string(b[i:])
		}
	}
}

// Encoder appends values to a byte slice. The zero value is ready for use.
type Encoder struct {
	buf []byte
}

// NewEncoder returns an Encoder that appends to buf.
func NewEncoder(buf []byte) *Encoder { return &Encoder{buf: buf} }

// Bytes returns all bytes encoded so far.
func (e *Encoder) Bytes() []byte { return e.buf }

// Len returns the number of bytes encoded so far.
func (e *Encoder) Len() int { return len(e.buf) }

// Version starts a message of version v, which must be at least 1.
func (e *Encoder) Version(v uint64) { e.Uvarint(v) }

// Uvarint appends an unsigned number.
func (e *Encoder) Uvarint(v uint64) { e.buf = binary.AppendUvarint(e.buf, v) }

// Varint appends a signed number.
func (e *Encoder) Varint(v int64) { e.buf = binary.AppendVarint(e.buf, v) }

// Bool appends a bool.
func (e *Encoder) Bool(v bool) {
	var b byte
	if v {
		b = 1
	}
	e.buf = append(e.buf, b)
}

// Data appends a length and the bytes of v.
func (e *Encoder) Data(v []byte) {
	e.Uvarint(uint64(len(v)))
	e.buf = append(e.buf, v...)
}

// String appends a length and the bytes of v.
func (e *Encoder) String(v string) {
	e.Uvarint(uint64(len(v)))
	e.buf = append(e.buf, v...)
}

// Strings appends a count and each string of v.
func (e *Encoder) Strings(v []string) {
	e.Uvarint(uint64(len(v)))
	for _, s := range v {
		e.String(s)
	}
}
