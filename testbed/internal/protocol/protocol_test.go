package protocol

import (
	"bufio"
	"bytes"
	"errors"
	"testing"
)

// A client may be cut off after any byte; the next one must be understood.
func TestHelloAfterAnyCut(t *testing.T) {
	frame := AppendFrame(nil, Stdin, bytes.Repeat([]byte{0, 0xff, 'a'}, 4000))
	buf := make([]byte, MaxPayload)
	cuts := []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 500, len(frame) - 1, len(frame)}
	for _, cut := range cuts {
		nonce := NewNonce()
		r := bufio.NewReader(bytes.NewReader(append(append([]byte(nil), frame[:cut]...), Hello(nonce)...)))
		var err error
		for err == nil {
			_, _, err = ReadFrame(r, buf)
		}
		if !errors.Is(err, ErrResync) {
			t.Fatalf("cut at %d: %v, want a resync", cut, err)
		}
		got, version, err := ReadHello(r)
		if err != nil || got != nonce || version != Version {
			t.Fatalf("cut at %d: hello %x version %d: %v", cut, got, version, err)
		}
	}
}

func TestAckSkipsStaleOutput(t *testing.T) {
	stale, nonce := NewNonce(), NewNonce()
	var b []byte
	b = append(b, AppendFrame(nil, Stdout, []byte("old output"))[:11]...)
	b = append(b, Ack(stale)...)
	b = append(b, ackMagic[:7]...)
	b = append(b, Ack(nonce)...)
	b = AppendFrame(b, Exit, Uint32(3))
	r := bufio.NewReader(bytes.NewReader(b))
	if _, err := ReadAck(r, nonce); err != nil {
		t.Fatal(err)
	}
	typ, p, err := ReadFrame(r, make([]byte, MaxPayload))
	if err != nil || typ != Exit {
		t.Fatalf("frame after the ack: %v %v", typ, err)
	}
	if code, err := ParseUint32(p); err != nil || code != 3 {
		t.Fatalf("code %d: %v", code, err)
	}
}

func FuzzReadFrame(f *testing.F) {
	f.Add(AppendFrame(nil, Stdin, []byte("x")))
	f.Add(Hello(Nonce{}))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bufio.NewReader(bytes.NewReader(b))
		buf := make([]byte, MaxPayload)
		for {
			if _, _, err := ReadFrame(r, buf); err != nil {
				return
			}
		}
	})
}
