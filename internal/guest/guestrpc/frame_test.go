package guestrpc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"syscall"
	"testing"
	"testing/iotest"
)

func TestFrameReaderBuffer(t *testing.T) {
	large := make([]byte, MaxPayload)
	for i := range large {
		large[i] = byte(i * 7)
	}
	in := concat(
		frame(frameData, 0, 1, 1), frame(frameData, 0, 1, large...), frame(frameData, 0, 1, large[:50000]...),
		frame(frameEOF, 0, 1), frame(frameData, 0, 1, large[:4096]...), frame(frameEOF, 0, 1),
	)
	sizes := []int{1, MaxPayload, 50000, 0, 4096, 0}
	for name, r := range map[string]io.Reader{
		"whole":      bytes.NewReader(in),
		"one byte":   iotest.OneByteReader(bytes.NewReader(in)),
		"half":       iotest.HalfReader(bytes.NewReader(in)),
		"data + EOF": iotest.DataErrReader(bytes.NewReader(in)),
	} {
		t.Run(name, func(t *testing.T) {
			f := newFrameReader(r)
			for i, n := range sizes {
				h, p, err := f.next()
				if err != nil || int(h.length) != n || len(p) != n {
					t.Fatalf("frame %d: %+v, %v", i, h, err)
				}
				if n > 1 && !bytes.Equal(p, large[:n]) {
					t.Fatalf("frame %d: wrong payload", i)
				}
				if n > idleBuffer && len(f.buf) <= idleBuffer {
					t.Errorf("frame %d in a small buffer", i)
				}
			}
			if _, _, err := f.next(); err != io.EOF {
				t.Errorf("at the end: %v", err)
			}
			if len(f.buf) != idleBuffer {
				t.Errorf("idle with a buffer of %d bytes", len(f.buf))
			}
		})
	}
}

type brokenReader int

func (n brokenReader) Read([]byte) (int, error) { return int(n), nil }

func TestFrameReaderSurvivesABrokenReader(t *testing.T) {
	for _, n := range []brokenReader{0, -1, idleBuffer + 1} {
		if _, _, err := newFrameReader(n).next(); err != io.ErrNoProgress {
			t.Errorf("Read returning %d: %v", n, err)
		}
	}
}

func TestErrorFrom(t *testing.T) {
	wrapped := &fs.PathError{Op: "open", Path: "/x", Err: &Error{Code: CodeAborted, Message: "inner"}}
	for _, tt := range []struct {
		err  error
		want Code
		is   error
	}{
		{fs.ErrNotExist, CodeNotFound, fs.ErrNotExist},
		{fs.ErrExist, CodeAlreadyExists, fs.ErrExist},
		{fs.ErrPermission, CodePermissionDenied, fs.ErrPermission},
		{fs.ErrInvalid, CodeInvalidArgument, fs.ErrInvalid},
		{context.DeadlineExceeded, CodeDeadlineExceeded, context.DeadlineExceeded},
		{context.Canceled, CodeAborted, nil},
		{syscall.ESRCH, CodeNotFound, fs.ErrNotExist},
		{syscall.EEXIST, CodeAlreadyExists, fs.ErrExist},
		{syscall.ELOOP, CodeInvalidArgument, fs.ErrInvalid},
		{syscall.EROFS, CodePermissionDenied, fs.ErrPermission},
		{syscall.ENOTEMPTY, CodeFailedPrecondition, nil},
		{syscall.ENOSPC, CodeResourceExhausted, nil},
		{syscall.ETIMEDOUT, CodeDeadlineExceeded, context.DeadlineExceeded},
		{syscall.EIO, CodeInternal, nil},
		{io.EOF, CodeInternal, nil},
		{wrapped, CodeAborted, nil},
	} {
		e := ErrorFrom(tt.err)
		if e.Code != tt.want || (tt.is != nil && !errors.Is(e, tt.is)) || errors.Is(e, io.ErrShortWrite) {
			t.Errorf("%v became %v", tt.err, e)
		}
		back, err := decodeError(appendError(nil, e))
		if err != nil || back.Code != e.Code || back.Message != e.Message {
			t.Errorf("%v came back as %v, %v", e, back, err)
		}
	}
	if ErrorFrom(nil) != nil {
		t.Error("nil became an error")
	}
	if got := (&Error{Code: CodeNotFound}).Error(); got != "not_found" {
		t.Errorf("got %q", got)
	}
	if got := Code(200).String(); got != "internal" {
		t.Errorf("got %q", got)
	}
}

func BenchmarkPing(b *testing.B) {
	c := start(b, newFakeGuest())
	ctx := context.Background()
	b.ReportAllocs()
	for b.Loop() {
		if err := c.Ping(ctx); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkInfo(b *testing.B) {
	c := start(b, newFakeGuest())
	ctx := context.Background()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Info(ctx); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkRead1MiB(b *testing.B) {
	g := newFakeGuest()
	g.files["x"] = make([]byte, 1<<20)
	c := start(b, g)
	ctx := context.Background()
	buf := make([]byte, 64<<10)
	b.SetBytes(1 << 20)
	b.ReportAllocs()
	for b.Loop() {
		r, err := c.OpenRead(ctx, ReadRequest{Path: "x"})
		if err != nil {
			b.Fatal(err)
		}
		if n, err := io.CopyBuffer(onlyWriter{io.Discard}, onlyReader{r}, buf); err != nil || n != 1<<20 {
			b.Fatal(n, err)
		}
	}
}

func BenchmarkWrite1MiB(b *testing.B) {
	c := start(b, &bulkGuest{fakeGuest: newFakeGuest()})
	ctx := context.Background()
	data := make([]byte, 1<<20)
	b.SetBytes(1 << 20)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.WriteFile(ctx, WriteRequest{Path: "x"}, bytes.NewReader(data)); err != nil {
			b.Fatal(err)
		}
	}
}
