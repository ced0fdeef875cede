package guestmux

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/sys/unix"
)

// patience ends a test that hangs.
const patience = 30 * time.Second

// pair is the two ends of a channel.
func pair(t testing.TB) (host, agent *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	host, agent = os.NewFile(uintptr(fds[0]), "host"), os.NewFile(uintptr(fds[1]), "agent")
	t.Cleanup(func() { _, _ = host.Close(), agent.Close() })
	return host, agent
}

// echo serves port 1 by sending all bytes back and port 2 by reading none. It refuses
// all other ports.
func echo(port uint32) (func(*Stream), error) {
	switch port {
	case 1:
		return func(s *Stream) {
			_, _ = io.Copy(s, s)
			_ = s.CloseWrite()
		}, nil
	case 2:
		return func(*Stream) {}, nil
	}
	return nil, errors.New("nobody listens there")
}

func start(t testing.TB, epoch uint64) (*Host, context.Context) {
	t.Helper()
	ours, theirs := pair(t)
	go func() { _ = Serve(theirs, echo) }()
	h := NewHost(ours)
	t.Cleanup(func() { _ = h.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	if err := h.Reset(ctx, epoch); err != nil {
		t.Fatal(err)
	}
	return h, ctx
}

// echoes sends bytes through a stream, and expects them back, followed by the end of
// the stream.
func echoes(t testing.TB, h *Host, ctx context.Context, data []byte) {
	t.Helper()
	s, err := h.Open(ctx, 1)
	if err != nil {
		t.Error(err)
		return
	}
	go func() {
		_, _ = s.Write(data) // missing bytes are noticed by the reader
		_ = s.CloseWrite()
	}()
	got, err := io.ReadAll(s)
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d of %d bytes came back, %v", len(got), len(data), err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// TestStreams: many streams at once, each with more bytes than its window, beside one
// that is not read.
func TestStreams(t *testing.T) {
	h, ctx := start(t, 7)
	stalled, err := h.Open(ctx, 2)
	if err != nil {
		t.Fatal(err)
	}
	blocked := make(chan error, 1)
	go func() {
		_, err := stalled.Write(make([]byte, 2*window))
		blocked <- err
	}()
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() { echoes(t, h, ctx, bytes.Repeat([]byte{byte(i)}, 3*window+i)) })
	}
	all.Wait()
	select {
	case err := <-blocked:
		t.Errorf("more than a window was taken by nobody: %v", err)
	default:
	}
	if err := stalled.Close(); err != nil {
		t.Error(err)
	}
	if err := <-blocked; !errors.Is(err, ErrClosed) {
		t.Errorf("a write to a stream that was closed: %v", err)
	}
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	if n := len(h.m.streams); n > 0 {
		t.Errorf("%d streams are left", n)
	}
}

func TestReaders(t *testing.T) {
	h, ctx := start(t, 1)
	s, err := h.Open(ctx, 1)
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Repeat("all the ways to read", 100)
	if _, err := s.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := s.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Write([]byte("x")); !errors.Is(err, ErrClosed) {
		t.Errorf("a write after the end: %v", err)
	}
	got, err := io.ReadAll(iotest.OneByteReader(s))
	if err != nil || string(got) != text {
		t.Errorf("%q, %v", got, err)
	}
}

func TestRefused(t *testing.T) {
	h, ctx := start(t, 1)
	if _, err := h.Open(ctx, 9); err == nil || err.Error() != "nobody listens there" {
		t.Errorf("a port that nobody serves: %v", err)
	}
	echoes(t, h, ctx, []byte("still there"))
	gone, cancel := context.WithCancel(ctx)
	cancel()
	if s, err := h.Open(gone, 1); err == nil { // the answer may have been faster
		_ = s.Close()
	}
}

// TestCopy: a copy of an agent has streams of the source, and sends messages that
// were meant for the source's host. It serves a new host as if it were new.
func TestCopy(t *testing.T) {
	ours, theirs := pair(t)
	go func() { _ = Serve(theirs, echo) }()
	source := NewHost(ours)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := source.Reset(ctx, 1); err != nil {
		t.Fatal(err)
	}
	old, err := source.Open(ctx, 1)
	if err != nil {
		t.Fatal(err)
	}
	// The copy gets another host on the same end. Messages of the first host from
	// here on belong to another epoch.
	if err := source.m.send(kindReset, 2, 0, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := old.Write([]byte("of the source")); err != nil {
		t.Fatal(err)
	}
	if err := source.Reset(ctx, 3); err != nil {
		t.Fatal(err)
	}
	if n, err := old.Read(make([]byte, 100)); n != 0 || err != io.EOF {
		t.Errorf("a stream of before the reset gave %d bytes, %v", n, err)
	}
	echoes(t, source, ctx, []byte("of the copy"))
}

// TestChannelEnds: waiting calls return when the channel ends.
func TestChannelEnds(t *testing.T) {
	ours, theirs := pair(t)
	go func() { _ = Serve(theirs, echo) }()
	h := NewHost(ours)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := h.Reset(ctx, 1); err != nil {
		t.Fatal(err)
	}
	s, err := h.Open(ctx, 1)
	if err != nil {
		t.Fatal(err)
	}
	read := make(chan error, 1)
	go func() {
		_, err := s.Read(make([]byte, 1))
		read <- err
	}()
	if err := theirs.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-read; err != io.EOF {
		t.Errorf("a read: %v", err)
	}
	<-h.Done()
	if h.Err() == nil {
		t.Error("the channel does not say why it ended")
	}
	if _, err := h.Open(ctx, 1); err == nil {
		t.Error("a stream was opened on a channel that has ended")
	}
	if err := h.Reset(ctx, 2); err == nil {
		t.Error("it was reset")
	}
}

func message(k kind, epoch uint64, id uint32, payload ...byte) []byte {
	b := binary.LittleEndian.AppendUint64([]byte{byte(k)}, epoch)
	return append(binary.LittleEndian.AppendUint32(b, id), payload...)
}

// TestHostileAgent: an agent that violates the protocol ends its channel, and does no
// other harm.
func TestHostileAgent(t *testing.T) {
	big := make([]byte, MaxPayload)
	for name, said := range map[string][][]byte{
		"short":           {{1, 2, 3}},
		"opens":           {message(kindOpen, 1, 1, 0, 0, 0, 0)},
		"resets":          {message(kindReset, 1, 0)},
		"unknown":         {message(99, 1, 1)},
		"window too long": {message(kindWindow, 1, 1, 1, 2, 3, 4, 5)},
		"credit":          {message(kindWindow, 1, 1, 0xff, 0xff, 0xff, 0xff)},
		"beyond the window": {
			message(kindData, 1, 1, big...), message(kindData, 1, 1, big...), message(kindData, 1, 1, big...),
			message(kindData, 1, 1, big...), message(kindData, 1, 1, big...), message(kindData, 1, 1, big...),
			message(kindData, 1, 1, big...), message(kindData, 1, 1, big...), message(kindData, 1, 1, 1),
		},
		"data after the end": {message(kindEnd, 1, 1), message(kindData, 1, 1, 1)},
	} {
		t.Run(name, func(t *testing.T) {
			ours, theirs := pair(t)
			h := NewHost(ours)
			h.m.mu.Lock()
			h.m.epoch = 1
			h.m.streams[1] = newStream(h.m, 1, 1)
			h.m.mu.Unlock()
			for _, m := range said {
				if _, err := theirs.Write(m); err != nil {
					t.Fatal(err)
				}
			}
			<-h.Done()
			if !errors.Is(h.Err(), ErrViolation) {
				t.Errorf("it ended with %v", h.Err())
			}
		})
	}
}

// FuzzHost: for any messages of an agent, its host does not panic and keeps at most a
// window of bytes.
func FuzzHost(f *testing.F) {
	f.Add([]byte{byte(kindData), 1, byte(kindEnd), 0})
	f.Add([]byte{byte(kindWindow), 4, byte(kindAbort), 3, byte(kindOpened), 0, byte(kindReady), 0})
	f.Fuzz(func(t *testing.T, said []byte) {
		ours, _ := pair(t)
		h := &Host{m: newMux(ours), ready: make(chan uint64, 1), done: make(chan struct{})}
		h.m.epoch = 1
		h.m.streams[1] = newStream(h.m, 1, 1)
		payload := make([]byte, MaxPayload)
		for len(said) > 1 {
			n := int(said[1]) * (MaxPayload / 255)
			if err := h.handle(kind(said[0]), 1, 1, payload[:n]); err != nil {
				return
			}
			if s := h.m.streams[1]; s != nil && len(s.in) > window {
				t.Fatalf("%d bytes are kept", len(s.in))
			}
			said = said[2:]
		}
	})
}
