package guestmem

import (
	"bytes"
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// TestMessages sends a message from many ranges over a socket to others.
func TestMessages(t *testing.T) {
	m := newMemory(t, 64*PageSize)
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = unix.Close(fds[0]), unix.Close(fds[1]) }()
	text := bytes.Repeat([]byte("0123456789abcdef"), 1000)
	if err := m.Write(100, text); err != nil {
		t.Fatal(err)
	}
	var from, to []Range
	for i := range uint32(16) {
		from = append(from, Range{100 + 1000*uint64(i), 1000})
		to = append(to, Range{32*PageSize + 2000*uint64(i), 1000})
	}
	if err := m.WriteMessage(fds[0], []byte("head"), from); err != nil {
		t.Fatal(err)
	}
	head := make([]byte, 4)
	if n, err := m.ReadMessage(fds[1], head, to); err != nil || n != 4+16000 || string(head) != "head" {
		t.Fatalf("%d bytes, %q, %v", n, head, err)
	}
	for i, r := range to {
		got := make([]byte, r.Len)
		if err := m.Read(r.GPA, got); err != nil || !bytes.Equal(got, text[i*1000:(i+1)*1000]) {
			t.Fatalf("piece %d is another, %v", i, err)
		}
	}
	if _, err := m.ReadMessage(fds[1], head, to); !errors.Is(err, unix.EAGAIN) {
		t.Fatalf("of an empty socket: %v", err)
	}
	for err = nil; err == nil; err = m.WriteMessage(fds[0], head, from) {
	}
	if !errors.Is(err, unix.EAGAIN) {
		t.Fatalf("to a full socket: %v", err)
	}
	// The rest of a longer message is lost, and the memory behind the ranges is
	// not written.
	if n, err := m.ReadMessage(fds[1], head, to[:1]); err != nil || n != 1004 {
		t.Fatalf("%d bytes, %v", n, err)
	}
	for name, ranges := range map[string][]Range{
		"outside": {{0, 10}, {64 * PageSize, 1}}, "many": make([]Range, MaxPieces+1),
	} {
		if err := m.WriteMessage(fds[0], head, ranges); !errors.Is(err, ErrRange) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := m.ReadMessage(fds[1], head, ranges); !errors.Is(err, ErrRange) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
