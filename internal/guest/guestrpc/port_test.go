package guestrpc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
)

// Connect implements Handler: an echo on every port but the first 1024.
func (g *fakeGuest) Connect(_ context.Context, req *ConnectRequest, s *PortStream) error {
	if req.Port <= 1024 {
		return newError(CodeFailedPrecondition, "nothing listens")
	}
	if err := s.Connected(); err != nil {
		return err
	}
	if _, err := io.Copy(s, s); err != nil {
		g.note("left")
		return err
	}
	return s.CloseWrite()
}

// TestConnect: bytes go both ways, beyond the windows. Each side learns when the
// other has closed its own.
func TestConnect(t *testing.T) {
	c := start(t, newFakeGuest())
	ctx, cancel := context.WithCancel(testContext(t))
	conn, err := c.Connect(ctx, ConnectRequest{Port: 8080})
	if err != nil {
		t.Fatal(err)
	}
	cancel() // ends the dial's context, not the connection
	sent := bytes.Repeat([]byte("0123456789abcdef"), 1<<17)
	wrote := make(chan error, 1)
	go func() {
		_, err := conn.Write(sent)
		wrote <- errors.Join(err, conn.CloseWrite())
	}()
	got, err := io.ReadAll(conn)
	if err := errors.Join(err, <-wrote); err != nil || !bytes.Equal(got, sent) {
		t.Errorf("%d of %d bytes came back, %v", len(got), len(sent), err)
	}
	<-conn.Done()
	if _, err := conn.Write([]byte("x")); err == nil {
		t.Error("wrote to what has ended")
	}
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
}

func TestConnectRefused(t *testing.T) {
	c := start(t, newFakeGuest())
	_, err := c.Connect(testContext(t), ConnectRequest{Port: 80})
	var e *Error
	if !errors.As(err, &e) || e.Code != CodeFailedPrecondition {
		t.Errorf("connected to what does not listen: %v", err)
	}
}

// TestConnectClosed: the guest notices a host that leaves. Reads and writes on a
// closed connection fail.
func TestConnectClosed(t *testing.T) {
	g := newFakeGuest()
	c := start(t, g)
	conn, err := c.Connect(testContext(t), ConnectRequest{Port: 8080})
	if err != nil {
		t.Fatal(err)
	}
	read := make(chan error, 1)
	go func() {
		_, err := conn.Read(make([]byte, 1))
		read <- err
	}()
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	if err := <-read; !errors.Is(err, ErrClosed) {
		t.Errorf("the read under way got %v", err)
	}
	if _, err := conn.Write([]byte("x")); !errors.Is(err, ErrClosed) {
		t.Errorf("a write got %v", err)
	}
	for range 3 * MaxStreams { // a closed connection does not count
		conn, err := c.Connect(testContext(t), ConnectRequest{Port: 8080})
		if err != nil {
			t.Fatal(err)
		}
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
		if err := c.Ping(testContext(t)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestConnectHostile: an invalid answer of a guest to a connection ends the session
// with the reason.
func TestConnectHostile(t *testing.T) {
	accepted := frame(frameHeaders, 0, 1, 1)
	for name, tt := range map[string]struct {
		in   []byte
		want string
	}{
		"data before it is accepted": {frame(frameData, Stdout, 1, 1), "before HEADERS"},
		"malformed acceptance":       {frame(frameHeaders, 0, 1, 0xff), "malformed"},
		"data on stdin":              {concat(accepted, frame(frameData, Stdin, 1, 1)), "does not use"},
		"data on stderr":             {concat(accepted, frame(frameData, Stderr, 1, 1)), "does not use"},
		"data after the end":         {concat(accepted, frame(frameEOF, Stdout, 1), frame(frameData, Stdout, 1, 1)), "after EOF"},
		"data beyond the window":     {concat(accepted, bytes.Repeat(frame(frameData, Stdout, 1, make([]byte, MaxPayload)...), 5)), "beyond the window"},
		"the end twice":              {concat(accepted, frame(frameEOF, Stdout, 1), frame(frameEOF, Stdout, 1)), "EOF on a channel"},
	} {
		t.Run(name, func(t *testing.T) {
			c := dialHostile(t, tt.in)
			conn, err := c.Connect(testContext(t), ConnectRequest{Port: 8080})
			if err == nil {
				<-c.Done()
				err = errors.Join(c.Err(), conn.Close())
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}
