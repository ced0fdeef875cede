package guestrpc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
)

// movable is the guest's end of a connection whose other end can be replaced, as for
// a guest that was copied.
type movable struct {
	*io.PipeReader
	in *io.PipeWriter

	mu  sync.Mutex // protects out
	out net.Conn
}

func newMovable() *movable {
	r, w := io.Pipe()
	return &movable{PipeReader: r, in: w}
}

// host returns a new other end. Data that the old one has not sent is lost.
func (m *movable) host() net.Conn {
	ours, theirs := net.Pipe()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.out = theirs
	go func() { _, _ = io.Copy(m.in, theirs) }()
	return ours
}

func (m *movable) Write(p []byte) (int, error) {
	m.mu.Lock()
	out := m.out
	m.mu.Unlock()
	return out.Write(p)
}

func (m *movable) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return errors.Join(m.PipeReader.Close(), m.out.Close())
}

// openStandby is a fake guest with an open standby.
func openStandby(t *testing.T) (*Standby, *fakeGuest, *movable) {
	t.Helper()
	g, end := newFakeGuest(), newMovable()
	host := end.host()
	served := make(chan error, 1)
	go func() { served <- Serve(context.Background(), end, g) }()
	s, err := OpenStandby(t.Context(), host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = s.Close()
		_ = end.Close()
		<-served
	})
	return s, g, end
}

// TestStandbyGoesOn: a client that is made only from a connection and the agreed
// state goes on where the standby stopped.
func TestStandbyGoesOn(t *testing.T) {
	s, g, end := openStandby(t)
	for range 3 {
		if err := s.Prepare(t.Context(), PrepareRequest{Settle: true}); err != nil {
			t.Fatal(err)
		}
	}
	if len(g.prepared) != 3 || !g.prepared[0].Settle {
		t.Fatalf("prepared %v", g.prepared)
	}
	c, err := Resume(end.host(), s.Agreed())
	if err != nil {
		t.Fatal(err)
	}
	if c.Version() != s.client.Version() {
		t.Errorf("version %d became %d", s.client.Version(), c.Version())
	}
	reply, err := c.Renew(t.Context(), *renewal(7))
	if err != nil || reply.Generation != 7 {
		t.Fatalf("%+v, %v", reply, err)
	}
	if err := c.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestResumeRefuses: Resume refuses a state that no standby has returned.
func TestResumeRefuses(t *testing.T) {
	s, _, _ := openStandby(t)
	good := s.Agreed()
	for name, b := range map[string][]byte{
		"nothing":   nil,
		"an id":     good[:4],
		"half":      good[:len(good)-1],
		"one hello": good[:4+(len(good)-4)/2],
		"more":      append(bytes.Clone(good), 0),
		"noise":     bytes.Repeat([]byte{7}, len(good)),
	} {
		ours, theirs := net.Pipe()
		if _, err := Resume(ours, b); err == nil {
			t.Errorf("%s was accepted", name)
		}
		if _, err := theirs.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("%s: the connection was not closed: %v", name, err)
		}
	}
}
