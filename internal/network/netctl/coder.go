package netctl

import (
	"errors"
	"net/netip"
	"time"

	"agentrun.dev/internal/codec"
)

// coder visits the fields of a message, and encodes or decodes each. So both
// directions use the same order.
type coder struct {
	e *codec.Encoder // nil: decode
	d *codec.Decoder
}

// Errors about values that are well-formed but not allowed.
var (
	errAddress = errors.New("an address has neither 4 nor 16 bytes")
	errPrefix  = errors.New("a prefix is longer than its address")
)

func (c coder) number(v *uint64) { c.numberMax(v, 1<<64-1) }

func (c coder) numberMax(v *uint64, limit uint64) {
	if c.e != nil {
		c.e.Uvarint(*v)
		return
	}
	*v = c.d.UvarintMax(limit)
}

// integer is a number that fits into 32 bits.
func (c coder) integer(v *int) {
	n := uint64(*v)
	c.numberMax(&n, 1<<31-1)
	*v = int(n)
}

func (c coder) signed(v *int64) {
	if c.e != nil {
		c.e.Varint(*v)
		return
	}
	*v = c.d.Varint()
}

func (c coder) flag(v *bool) {
	if c.e != nil {
		c.e.Bool(*v)
		return
	}
	*v = c.d.Bool()
}

func (c coder) text(v *string, limit int) {
	if c.e != nil {
		c.e.String(*v)
		return
	}
	*v = c.d.String(limit)
}

func (c coder) texts(v *[]string, count, limit int) {
	if c.e != nil {
		c.e.Strings(*v)
		return
	}
	*v = c.d.Strings(count, limit)
}

func (c coder) data(v *[]byte, limit int) {
	if c.e != nil {
		c.e.Data(*v)
		return
	}
	*v = c.d.Data(limit)
}

// time is in nanoseconds since 1970; the zero time is 0.
func (c coder) time(v *time.Time) {
	var ns int64
	if !v.IsZero() {
		ns = v.UnixNano()
	}
	if c.signed(&ns); c.d != nil {
		if *v = (time.Time{}); ns != 0 {
			*v = time.Unix(0, ns).UTC()
		}
	}
}

func (c coder) duration(v *time.Duration) {
	n := uint64(*v)
	c.numberMax(&n, uint64(maxDuration))
	*v = time.Duration(n)
}

// address is 4 or 16 bytes, or no bytes for the zero address. Zones are not carried.
func (c coder) address(v *netip.Addr) {
	if c.e != nil {
		c.e.Data(v.AsSlice())
		return
	}
	b := c.d.View(16)
	a, ok := netip.AddrFromSlice(b)
	if !ok && len(b) > 0 {
		c.d.Fail(errAddress)
	}
	*v = a
}

func (c coder) endpoint(v *netip.AddrPort) {
	a, port := v.Addr(), uint64(v.Port())
	c.address(&a)
	c.numberMax(&port, 1<<16-1)
	*v = netip.AddrPortFrom(a, uint16(port))
}

func (c coder) prefix(v *netip.Prefix) {
	a, bits := v.Addr(), uint64(max(v.Bits(), 0))
	c.address(&a)
	c.numberMax(&bits, 128)
	if c.d == nil {
		return
	}
	if *v = netip.PrefixFrom(a, int(bits)); c.d.Err() == nil && !v.IsValid() {
		c.d.Fail(errPrefix)
	}
}

func (c coder) mac(v *[6]byte) {
	if c.e != nil {
		c.e.Data(v[:])
		return
	}
	b := c.d.View(len(v))
	if c.d.Err() == nil && len(b) != len(v) {
		c.d.Fail(errors.New("a MAC has six bytes"))
		return
	}
	copy(v[:], b)
}

// list visits a list of at most limit elements.
func list[T any](c coder, v *[]T, limit int, each func(coder, *T)) {
	if c.e != nil {
		c.e.Uvarint(uint64(len(*v)))
		for i := range *v {
			each(c, &(*v)[i])
		}
		return
	}
	*v = nil
	// The list is not preallocated, because the count may be a lie until the elements
	// are decoded.
	for range c.d.Count(limit) {
		var one T
		each(c, &one)
		if c.d.Err() != nil {
			*v = nil
			return
		}
		*v = append(*v, one)
	}
}
