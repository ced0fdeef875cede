package codec

import (
	"bytes"
	"errors"
	"math"
	"reflect"
	"testing"
)

func TestRoundTrip(t *testing.T) {
	e := NewEncoder(nil)
	e.Version(1)
	for _, u := range []uint64{0, 1, 127, 128, 1 << 32, math.MaxUint64} {
		e.Uvarint(u)
	}
	for _, v := range []int64{0, -1, 1, math.MinInt64, math.MaxInt64} {
		e.Varint(v)
	}
	e.Bool(true)
	e.Bool(false)
	e.Data([]byte{1, 2, 3})
	e.Data(nil)
	e.String("héllo")
	e.Strings([]string{"a", "", "bc"})
	e.Strings(nil)
	if e.Len() != len(e.Bytes()) {
		t.Fatal("Len differs from the bytes")
	}

	d := NewDecoder(e.Bytes())
	if v := d.Version(1); v != 1 {
		t.Fatalf("version %d", v)
	}
	for _, want := range []uint64{0, 1, 127, 128, 1 << 32, math.MaxUint64} {
		if got := d.Uvarint(); got != want {
			t.Errorf("uvarint %d, want %d", got, want)
		}
	}
	for _, want := range []int64{0, -1, 1, math.MinInt64, math.MaxInt64} {
		if got := d.Varint(); got != want {
			t.Errorf("varint %d, want %d", got, want)
		}
	}
	if !d.Bool() || d.Bool() {
		t.Error("bools differ")
	}
	if got := d.Data(3); !bytes.Equal(got, []byte{1, 2, 3}) {
		t.Errorf("data %v", got)
	}
	if got := d.Data(3); got != nil {
		t.Errorf("empty data %v, want nil", got)
	}
	if got := d.String(10); got != "héllo" {
		t.Errorf("string %q", got)
	}
	if got := d.Strings(3, 2); !reflect.DeepEqual(got, []string{"a", "", "bc"}) {
		t.Errorf("strings %q", got)
	}
	if got := d.Strings(3, 2); got != nil {
		t.Errorf("no strings %q, want nil", got)
	}
	if d.Len() != 0 {
		t.Errorf("%d bytes left", d.Len())
	}
	if err := d.Finish(); err != nil {
		t.Fatal(err)
	}
}

func TestDecodeErrors(t *testing.T) {
	tests := []struct {
		name string
		in   []byte
		read func(*Decoder)
		want error
	}{
		{"empty uvarint", nil, func(d *Decoder) { d.Uvarint() }, ErrTruncated},
		{"cut uvarint", []byte{0x80}, func(d *Decoder) { d.Uvarint() }, ErrTruncated},
		{"long uvarint", bytes.Repeat([]byte{0xff}, 11), func(d *Decoder) { d.Uvarint() }, ErrOverflow},
		{"redundant zero", []byte{0x80, 0x00}, func(d *Decoder) { d.Uvarint() }, ErrNotMin},
		{"over the maximum", []byte{9}, func(d *Decoder) { d.UvarintMax(8) }, ErrRange},
		{"empty bool", nil, func(d *Decoder) { d.Bool() }, ErrTruncated},
		{"bool of 2", []byte{2}, func(d *Decoder) { d.Bool() }, ErrBool},
		{"string over its limit", []byte{3, 'a', 'b', 'c'}, func(d *Decoder) { d.String(2) }, ErrTooLong},
		{"string past the end", []byte{3, 'a'}, func(d *Decoder) { d.String(9) }, ErrTruncated},
		{"huge length", []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1}, func(d *Decoder) { d.Data(math.MaxInt) }, ErrTooLong},
		{"negative limit", []byte{0}, func(d *Decoder) { d.Data(-1) }, ErrTooLong},
		{"count over its limit", []byte{2, 0, 0}, func(d *Decoder) { d.Strings(1, 1) }, ErrTooLong},
		{"count past the end", []byte{9, 0, 0}, func(d *Decoder) { d.Strings(10, 1) }, ErrTruncated},
		{"bad string in list", []byte{1, 5}, func(d *Decoder) { d.Strings(1, 9) }, ErrTruncated},
		{"version 0", []byte{0}, func(d *Decoder) { d.Version(1) }, ErrVersion},
		{"no version", nil, func(d *Decoder) { d.Version(1) }, ErrTruncated},
		{"trailing", []byte{1, 7}, func(d *Decoder) { d.Version(1) }, ErrTrailing},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := NewDecoder(tt.in)
			tt.read(d)
			err := d.Finish()
			if !errors.Is(err, tt.want) {
				t.Fatalf("got %v, want %v", err, tt.want)
			}
			var de *DecodeError
			if !errors.As(err, &de) || de.Error() == "" {
				t.Fatalf("%v is not a DecodeError", err)
			}
			// The first error sticks, and no value is read after it.
			if d.Uvarint() != 0 || d.Varint() != 0 || d.Bool() || d.String(9) != "" || d.Data(9) != nil ||
				d.Strings(9, 9) != nil || d.Rest() != nil || d.Len() != 0 || d.Version(1) != 0 {
				t.Error("a value was decoded after an error")
			}
			d.Fail(ErrRange)
			if d.Err() != err {
				t.Errorf("error changed to %v", d.Err())
			}
		})
	}
}

func TestNewerVersionMayAppendFields(t *testing.T) {
	e := NewEncoder(nil)
	e.Version(2)
	e.String("old")
	e.Uvarint(42)

	d := NewDecoder(e.Bytes())
	if v := d.Version(1); v != 1 {
		t.Fatalf("version %d, want the known one", v)
	}
	if s := d.String(8); s != "old" {
		t.Fatalf("got %q", s)
	}
	if err := d.Finish(); err != nil {
		t.Fatal(err)
	}
	if rest := d.Rest(); len(rest) != 1 || rest[0] != 42 {
		t.Fatalf("rest %v", rest)
	}
}

func TestDecodeErrorOffset(t *testing.T) {
	d := NewDecoder([]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 2})
	for range 11 {
		d.Uvarint()
	}
	d.Bool()
	if got, want := d.Err().Error(), "decode at byte 11: "+ErrBool.Error(); got != want {
		t.Fatalf("got %q, want %q", got, want)
	}
}

func TestStringsAllocateOnlyWhatIsThere(t *testing.T) {
	// The count says 60,000 strings, and the second one is cut off.
	in := NewEncoder(nil)
	in.Uvarint(60000)
	in.Uvarint(0)
	in.Uvarint(1 << 40)
	buf := append(in.Bytes(), make([]byte, 60000)...)
	allocs := testing.AllocsPerRun(10, func() {
		d := NewDecoder(buf)
		if d.Strings(1<<20, 1<<50) != nil || d.Err() == nil {
			t.Fatal("decoded a cut list")
		}
	})
	if allocs > 4 {
		t.Errorf("%v allocations", allocs)
	}
}

// FuzzDecoder runs the decoder as the first bytes say, on the rest as input. It
// must not panic or return more than the input, and all that decodes must
// encode to the same bytes.
func FuzzDecoder(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6}, []byte{1, 2, 1, 2, 'h', 'i', 1, 'x', 2, 1, 'a', 1, 'b'})
	f.Add([]byte{5, 5}, []byte{0xff, 0xff, 0xff, 0xff, 0x0f})
	f.Add([]byte{0}, []byte{0x80, 0x00})
	f.Fuzz(func(t *testing.T, program, in []byte) {
		d, e := NewDecoder(in), NewEncoder(nil)
		for _, op := range program {
			switch op % 6 {
			case 0:
				if v := d.Uvarint(); d.Err() == nil {
					e.Uvarint(v)
				}
			case 1:
				if v := d.Varint(); d.Err() == nil {
					e.Varint(v)
				}
			case 2:
				if v := d.Bool(); d.Err() == nil {
					e.Bool(v)
				}
			case 3:
				if v := d.Data(1 << 16); d.Err() == nil {
					e.Data(v)
				}
			case 4:
				if v := d.String(1 << 16); d.Err() == nil {
					e.String(v)
				}
			case 5:
				v := d.Strings(1<<10, 1<<16)
				if d.Err() == nil {
					e.Strings(v)
				}
				if len(v) > len(in) {
					t.Fatalf("%d strings from %d bytes", len(v), len(in))
				}
			}
			if d.Err() != nil {
				break
			}
		}
		if !bytes.HasPrefix(in, e.Bytes()) {
			t.Fatalf("decoded % x, encoded % x", in, e.Bytes())
		}
	})
}
