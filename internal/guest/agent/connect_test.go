package agent

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/guest/guestrpc"
)

func listenerPort(t *testing.T, at string) (net.Listener, uint16) {
	t.Helper()
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l, uint16(l.Addr().(*net.TCPAddr).Port)
}

// TestConnect: the host reaches a listening program on either loopback address. Data
// goes both ways, up to the end of each stream.
func TestConnect(t *testing.T) {
	c := startClient(t)
	for _, at := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, port := listenerPort(t, at)
		go func() {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.Copy(conn, conn)
			_ = conn.Close()
		}()
		conn, err := c.Connect(rpcContext(t), guestrpc.ConnectRequest{Port: port})
		if err != nil {
			t.Fatal(at, err)
		}
		sent := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
		go func() {
			_, _ = conn.Write(sent)
			_ = conn.CloseWrite()
		}()
		if got, err := io.ReadAll(conn); err != nil || !bytes.Equal(got, sent) {
			t.Errorf("%s: %d of %d bytes, %v", at, len(got), len(sent), err)
		}
		<-conn.Done()
	}
}

// TestConnectEnds: the program learns that the host has left, and the host learns
// that the program has.
func TestConnectEnds(t *testing.T) {
	c := startClient(t)
	l, port := listenerPort(t, "127.0.0.1:0")
	accept := func() (*guestrpc.PortConn, *net.TCPConn) {
		conn, err := c.Connect(rpcContext(t), guestrpc.ConnectRequest{Port: port})
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		return conn, theirs.(*net.TCPConn)
	}
	conn, program := accept()
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	if n, err := program.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("the program reads %d bytes of a host that has left", n)
	}
	_ = program.Close()

	conn, program = accept()
	if err := errors.Join(program.SetLinger(0), program.Close()); err != nil { // a reset
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("after a reset the host reads %v", err)
	}
	<-conn.Done()

	conn, program = accept()
	if err := program.CloseWrite(); err != nil { // the program goes on reading
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("after the end the host reads %v", err)
	}
	if _, err := conn.Write([]byte("more")); err != nil {
		t.Error(err)
	}
	if err := conn.CloseWrite(); err != nil {
		t.Error(err)
	}
	if got, err := io.ReadAll(program); err != nil || string(got) != "more" {
		t.Errorf("the program reads %q, %v", got, err)
	}
	_ = program.Close()
	<-conn.Done()
}

// TestConnectRefused: the ways in which connecting can fail are distinguished.
func TestConnectRefused(t *testing.T) {
	c := startClient(t)
	l, closed := listenerPort(t, "127.0.0.1:0")
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for port, want := range map[uint16]guestrpc.Code{closed: guestrpc.CodeFailedPrecondition, 0: guestrpc.CodeInvalidArgument} {
		_, err := c.Connect(rpcContext(t), guestrpc.ConnectRequest{Port: port})
		var e *guestrpc.Error
		if !errors.As(err, &e) || e.Code != want {
			t.Errorf("port %d: %v", port, err)
		}
	}
}

// TestConnectStuck: a program that listens and does not accept blocks neither other
// connections nor a host that leaves.
func TestConnectStuck(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	port := uint16(name.(*unix.SockaddrInet4).Port)
	c := startClient(t)
	// Its queue takes a few connections. The next one has to wait.
	for range 8 {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		conn, err := c.Connect(ctx, guestrpc.ConnectRequest{Port: port})
		cancel()
		if err != nil {
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("connect to a full queue: %v", err)
			}
			if err := c.Ping(rpcContext(t)); err != nil {
				t.Error(err)
			}
			return
		}
		t.Cleanup(func() { _ = conn.Close() })
	}
	t.Error("the queue never was full")
}
