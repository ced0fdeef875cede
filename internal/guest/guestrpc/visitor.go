package guestrpc

import (
	"math"
	"strconv"
	"time"
	"unsafe"

	"agentrun.dev/internal/codec"
)

// Limits of message fields.
const (
	maxID        = 128
	maxPath      = 4096
	maxUser      = 256
	maxArgs      = 8192
	maxArg       = 60 << 10
	maxShort     = 256 // host names, kernel releases and the like
	maxListItems = 4096
	maxItem      = 20 << 10 // a FileInfo with two paths, or an ExecInfo
)

// message is a struct that can be sent. visit names its fields in
// order to c, which either writes or fills them: one list of fields serves
// both directions, so they can not disagree.
type message interface {
	visit(c *visitor)
}

// messageVersion is the version of every message in protocol version 1. A new field
// of a message is visited last, after a check of c.since(2).
const messageVersion = 1

// visitor visits the fields of a message. It writes them if e is set, and reads them
// if d is set.
type visitor struct {
	e       *codec.Encoder
	d       *codec.Decoder
	version uint64
	err     error // of encoding
	inPlace bool  // decoded bytes and strings stay in the input, uncopied
}

// marshal encodes m. A field over its limit is the caller's mistake, so marshal
// reports it instead of sending it.
func marshal(b []byte, m message) ([]byte, error) {
	c := visitor{e: codec.NewEncoder(b), version: messageVersion}
	c.e.Version(messageVersion)
	m.visit(&c)
	return c.e.Bytes(), c.err
}

// unmarshal decodes b into m, which must be zero.
func unmarshal(b []byte, m message) error {
	c := visitor{d: codec.NewDecoder(b)}
	c.version = c.d.Version(messageVersion)
	m.visit(&c)
	return c.d.Finish()
}

func (c *visitor) tooLong(what string, n, limit int) {
	if c.err == nil {
		c.err = newError(CodeInvalidArgument, what, " has length ", strconv.Itoa(n), ", the limit is ", strconv.Itoa(limit))
	}
}

func (c *visitor) str(what string, v *string, limit int) {
	if c.d != nil {
		b := c.d.View(limit)
		if c.inPlace {
			*v = unsafe.String(unsafe.SliceData(b), len(b)) // the caller must not change b meanwhile
		} else {
			*v = string(b)
		}
		return
	}
	if len(*v) > limit {
		c.tooLong(what, len(*v), limit)
		return
	}
	c.e.String(*v)
}

func (c *visitor) strs(what string, v *[]string, maxCount, maxLen int) {
	if c.d != nil {
		*v = c.d.Strings(maxCount, maxLen)
		return
	}
	if len(*v) > maxCount {
		c.tooLong(what, len(*v), maxCount)
		return
	}
	for _, s := range *v {
		if len(s) > maxLen {
			c.tooLong("an entry of "+what, len(s), maxLen)
			return
		}
	}
	c.e.Strings(*v)
}

// data carries bytes. Errors state their number, never their value.
func (c *visitor) data(what string, v *[]byte, limit int) {
	if c.d != nil {
		if c.inPlace {
			*v = c.d.View(limit)
		} else {
			*v = c.d.Data(limit)
		}
		return
	}
	if len(*v) > limit {
		c.tooLong(what, len(*v), limit)
		return
	}
	c.e.Data(*v)
}

func (c *visitor) bool(v *bool) {
	if c.d != nil {
		*v = c.d.Bool()
		return
	}
	c.e.Bool(*v)
}

func (c *visitor) u64(v *uint64) {
	if c.d != nil {
		*v = c.d.Uvarint()
		return
	}
	c.e.Uvarint(*v)
}

func (c *visitor) i64(v *int64) {
	if c.d != nil {
		*v = c.d.Varint()
		return
	}
	c.e.Varint(*v)
}

// i32 carries a number that may be negative.
func (c *visitor) i32(what string, v *int32) {
	if c.d != nil {
		n := c.d.Varint()
		if int64(int32(n)) != n {
			c.d.Fail(newError(CodeInvalidArgument, what, " is out of range"))
			return
		}
		*v = int32(n)
		return
	}
	c.e.Varint(int64(*v))
}

// number carries any integer type as an unsigned number of at most limit.
func number[T ~uint8 | ~uint16 | ~uint32 | ~int | ~int32](c *visitor, what string, v *T, limit uint64) {
	if c.d != nil {
		*v = T(c.d.UvarintMax(limit))
		return
	}
	if *v < 0 || uint64(*v) > limit {
		if c.err == nil {
			c.err = newError(CodeInvalidArgument, what, " is out of range")
		}
		return
	}
	c.e.Uvarint(uint64(*v))
}

func (c *visitor) dur(v *time.Duration) { c.i64((*int64)(v)) }

// zeroTime is the zero time.Time in seconds since 1970.
const zeroTime = -62135596800

func (c *visitor) time(v *time.Time) {
	if c.d != nil {
		sec, nsec := c.d.Varint(), c.d.UvarintMax(1e9-1)
		if sec != zeroTime || nsec != 0 {
			*v = time.Unix(sec, int64(nsec))
		}
		return
	}
	c.e.Varint(v.Unix())
	c.e.Uvarint(uint64(v.Nanosecond()))
}

// clock carries the time of a clock in nanoseconds since 1970; 0 is no time.
func (c *visitor) clock(v *time.Time) {
	if c.d != nil {
		if ns := c.d.UvarintMax(math.MaxInt64); ns != 0 {
			*v = time.Unix(0, int64(ns))
		}
		return
	}
	if v.IsZero() {
		c.e.Uvarint(0)
		return
	}
	ns := v.UnixNano() // wraps outside of its range
	if ns <= 0 || !time.Unix(0, ns).Equal(*v) {
		if c.err == nil {
			c.err = newError(CodeInvalidArgument, "wall clock is not after 1970 and before 2262")
		}
		return
	}
	c.e.Uvarint(uint64(ns))
}

// list carries a list of messages, each as bytes, so that messages can gain fields.
func list[T any, P interface {
	*T
	message
}](c *visitor, what string, v *[]T, maxCount int) {
	if c.d != nil {
		n := c.d.Count(maxCount)
		for range n {
			b := c.d.View(maxItem)
			if c.d.Err() != nil {
				return
			}
			var item T
			if err := unmarshal(b, P(&item)); err != nil {
				c.d.Fail(err)
				return
			}
			*v = append(*v, item)
		}
		return
	}
	if len(*v) > maxCount {
		c.tooLong(what, len(*v), maxCount)
		return
	}
	c.e.Uvarint(uint64(len(*v)))
	for i := range *v {
		b, err := marshal(nil, P(&(*v)[i]))
		if err == nil && len(b) > maxItem {
			err = newError(CodeInvalidArgument, "an entry of ", what, " is too large")
		}
		if err != nil {
			c.err = err
			return
		}
		c.e.Data(b)
	}
}

// nested carries one message inside another, as bytes.
func (c *visitor) nested(m message) {
	if c.d != nil {
		b := c.d.View(maxItem)
		if c.d.Err() != nil {
			return
		}
		if err := unmarshal(b, m); err != nil {
			c.d.Fail(err)
		}
		return
	}
	b, err := marshal(nil, m)
	if err != nil && c.err == nil {
		c.err = err
	}
	c.e.Data(b)
}

// replyBudget is how many bytes of a frame the entries of a page may take, so that
// the other fields still fit.
const replyBudget = MaxPayload - maxPath - 64

// fit returns how many of the items fit into a reply.
func fit[T any, P interface {
	*T
	message
}](items []T) int {
	var b []byte
	left := replyBudget
	for i := range items {
		var err error
		b, err = marshal(b[:0], P(&items[i]))
		left -= len(b) + 3 // and 3 bytes for its length
		if err != nil || len(b) > maxItem || left < 0 {
			return i
		}
	}
	return min(len(items), maxListItems)
}

// FitFiles returns how many of the entries fit into a ListReply.
func FitFiles(entries []FileInfo) int { return fit(entries) }

// FitExecs returns how many of the processes fit into a ListExecsReply.
func FitExecs(execs []ExecInfo) int { return fit(execs) }

// since reports whether the fields of message version v are present.
func (c *visitor) since(v uint64) bool { return c.version >= v }
