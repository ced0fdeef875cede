package codec

import "encoding/binary"

// Decoder reads values from a byte slice. The first error sticks: after it
// every method returns the zero value. So a caller may decode a whole message
// and check for errors once, with Finish.
type Decoder struct {
	buf   []byte
	off   int
	newer bool
	err   error
}

// NewDecoder returns a Decoder over buf. It never writes to buf.
func NewDecoder(buf []byte) *Decoder { return &Decoder{buf: buf} }

// Err returns the first error.
func (d *Decoder) Err() error { return d.err }

// Len returns the number of bytes not yet decoded; 0 after an error.
func (d *Decoder) Len() int {
	if d.err != nil {
		return 0
	}
	return len(d.buf) - d.off
}

// Fail records err at the current offset, unless there was an earlier error.
// Callers use it for values that are well formed but not allowed.
func (d *Decoder) Fail(err error) {
	if d.err == nil {
		d.err = &DecodeError{Offset: d.off, Err: err}
	}
}

// Version reads the version at the start of a message and returns the lower of
// it and known. If the message is newer than known, Finish ignores the bytes
// that are left.
func (d *Decoder) Version(known uint64) uint64 {
	v := d.Uvarint()
	if d.err != nil {
		return 0
	}
	if v == 0 {
		d.Fail(ErrVersion)
		return 0
	}
	d.newer = v > known
	return min(v, known)
}

// Finish returns the first error. Bytes that are left are an error, unless the
// message is of a version newer than the reader knows.
func (d *Decoder) Finish() error {
	if d.err == nil && !d.newer && d.off != len(d.buf) {
		d.Fail(ErrTrailing)
	}
	return d.err
}

// Uvarint reads an unsigned number.
func (d *Decoder) Uvarint() uint64 {
	if d.err != nil {
		return 0
	}
	v, n := binary.Uvarint(d.buf[d.off:])
	switch {
	case n == 0:
		d.Fail(ErrTruncated)
		return 0
	case n < 0:
		d.Fail(ErrOverflow)
		return 0
	case n > 1 && d.buf[d.off+n-1] == 0:
		d.Fail(ErrNotMin)
		return 0
	}
	d.off += n
	return v
}

// UvarintMax reads an unsigned number of at most limit.
func (d *Decoder) UvarintMax(limit uint64) uint64 {
	v := d.Uvarint()
	if v > limit {
		d.Fail(ErrRange)
		return 0
	}
	return v
}

// Varint reads a signed number.
func (d *Decoder) Varint() int64 {
	u := d.Uvarint()
	v := int64(u >> 1)
	if u&1 != 0 {
		v = ^v
	}
	return v
}

// Bool reads a bool.
func (d *Decoder) Bool() bool {
	if d.err != nil {
		return false
	}
	if d.off == len(d.buf) {
		d.Fail(ErrTruncated)
		return false
	}
	b := d.buf[d.off]
	if b > 1 {
		d.Fail(ErrBool)
		return false
	}
	d.off++
	return b == 1
}

// Count reads the length of a list. It must not exceed limit or the number of
// bytes left, because each element has at least one byte.
func (d *Decoder) Count(limit int) int {
	n := d.Uvarint()
	if d.err != nil {
		return 0
	}
	if limit < 0 || n > uint64(limit) {
		d.Fail(ErrTooLong)
		return 0
	}
	if n > uint64(len(d.buf)-d.off) {
		d.Fail(ErrTruncated)
		return 0
	}
	return int(n)
}

// View reads at most limit bytes and returns them without copying: the result
// aliases the input.
func (d *Decoder) View(limit int) []byte {
	n := d.Count(limit)
	if d.err != nil {
		return nil
	}
	v := d.buf[d.off : d.off+n : d.off+n]
	d.off += n
	return v
}

// Data reads at most limit bytes into a new slice; nil for no bytes.
func (d *Decoder) Data(limit int) []byte {
	v := d.View(limit)
	if len(v) == 0 {
		return nil
	}
	return append(make([]byte, 0, len(v)), v...)
}

// String reads a string of at most limit bytes.
func (d *Decoder) String(limit int) string { return string(d.View(limit)) }

// Strings reads at most maxCount strings of at most maxLen bytes each; nil for
// an empty list.
func (d *Decoder) Strings(maxCount, maxLen int) []string {
	n := d.Count(maxCount)
	if n == 0 {
		return nil
	}
	// Not preallocated: the count cannot be trusted before the strings were
	// read.
	var v []string
	for range n {
		s := d.String(maxLen)
		if d.err != nil {
			return nil
		}
		v = append(v, s)
	}
	return v
}

// Rest returns all bytes left, aliasing the input.
func (d *Decoder) Rest() []byte {
	if d.err != nil {
		return nil
	}
	v := d.buf[d.off:]
	d.off = len(d.buf)
	return v
}
