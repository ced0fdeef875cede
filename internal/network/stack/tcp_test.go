package stack

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"syscall"
	"testing"

	"agentrun.dev/test/soak"
	"golang.org/x/sys/unix"
)

// payload returns n bytes derived from seed.
func payload(seed uint64, n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16)})
	r.Read(b)
	return b
}

func echo(c *net.TCPConn) {
	io.Copy(c, c)
	c.CloseWrite()
}

// exchange sends data through an echo server and compares the bytes that come back.
func exchange(c net.Conn, data []byte) error {
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(data)
		if err == nil {
			err = c.(*net.TCPConn).CloseWrite()
		}
		sent <- err
	}()
	back, err := io.ReadAll(c)
	if err := errors.Join(err, <-sent); err != nil {
		return err
	}
	if sha256.Sum256(back) != sha256.Sum256(data) {
		return fmt.Errorf("%d bytes came back of %d, or others", len(back), len(data))
	}
	return nil
}

func TestConnections(t *testing.T) {
	for _, test := range []struct {
		name        string
		connections int
		size        int
		address     string
	}{
		{"one", 1, 32 << 20, "203.0.113.5"},
		{"one over IPv6", 1, 8 << 20, "[2001:db8::5]"},
		{"hundred", 100, soak.Count(1<<20, 256<<10), "203.0.113.5"},
		{"thousand", 1000, soak.Count(100<<10, 20<<10), "203.0.113.5"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p, g := newPoller(t), newGuest(t)
			w := attach(t, p, g, &loopback{})
			port := serve(t, echo)
			// All of them are open before the first byte is sent.
			conns := make([]net.Conn, test.connections)
			for i := range conns {
				c, err := g.dial("tcp", fmt.Sprintf("%s:%d", test.address, port))
				if err != nil {
					t.Fatalf("%v; the wire: %+v", err, w.Stats())
				}
				defer c.Close()
				conns[i] = c
			}
			if s := w.Stats(); s.Connections != test.connections || !s.Stack {
				t.Errorf("%d connections, stack %v", s.Connections, s.Stack)
			}
			var all sync.WaitGroup
			for i, c := range conns {
				all.Go(func() {
					if err := exchange(c, payload(uint64(i), test.size)); err != nil {
						t.Errorf("connection %d: %v", i, err)
					}
				})
			}
			all.Wait()
			eventually(t, "no connection left", func() bool { return w.Stats().Connections == 0 })
		})
	}
}

func TestErrors(t *testing.T) {
	p, g := newPoller(t), newGuest(t)
	o := &loopback{refuse: 1, unreachable: 2}
	w := attach(t, p, g, o)
	for _, test := range []struct {
		to   string
		want error
	}{
		{"203.0.113.5:1", syscall.ECONNREFUSED},
		{"[2001:db8::5]:1", syscall.ECONNREFUSED},
		{"203.0.113.5:2", syscall.EHOSTUNREACH},
		{"[2001:db8::5]:2", syscall.EHOSTUNREACH},
		{"10.255.255.1:80", syscall.ECONNREFUSED},
		{"[fd00:a9e7::1]:80", syscall.ECONNREFUSED},
	} {
		t.Run(test.to, func(t *testing.T) {
			if _, err := g.dial("tcp", test.to); !errors.Is(err, test.want) {
				t.Errorf("dial: %v, want %v", err, test.want)
			}
		})
	}
	if w.Stats().Stack {
		t.Error("refused connections made a stack")
	}
}

func TestHalfClose(t *testing.T) {
	p, g := newPoller(t), newGuest(t)
	attach(t, p, g, &loopback{})
	t.Run("inside first", func(t *testing.T) {
		port := serve(t, func(c *net.TCPConn) {
			b, _ := io.ReadAll(c)
			c.Write(append([]byte("after the end: "), b...))
		})
		c := g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.5:%d", port))
		defer c.Close()
		c.Write([]byte("hello"))
		c.(*net.TCPConn).CloseWrite()
		if b, err := io.ReadAll(c); string(b) != "after the end: hello" || err != nil {
			t.Errorf("read %q, %v", b, err)
		}
	})
	t.Run("outside first", func(t *testing.T) {
		got := make(chan string, 1)
		port := serve(t, func(c *net.TCPConn) {
			c.Write([]byte("bye"))
			c.CloseWrite()
			b, _ := io.ReadAll(c)
			got <- string(b)
		})
		c := g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.5:%d", port))
		defer c.Close()
		if b, err := io.ReadAll(c); string(b) != "bye" || err != nil {
			t.Errorf("read %q, %v", b, err)
		}
		c.Write([]byte("still here"))
		c.(*net.TCPConn).CloseWrite()
		if s := <-got; s != "still here" {
			t.Errorf("the server read %q", s)
		}
	})
}

func TestReset(t *testing.T) {
	p, g := newPoller(t), newGuest(t)
	w := attach(t, p, g, &loopback{})
	t.Run("by the outside", func(t *testing.T) {
		port := serve(t, func(c *net.TCPConn) { c.Read(make([]byte, 1)); c.SetLinger(0) })
		c := g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.5:%d", port))
		defer c.Close()
		c.Write([]byte("x"))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("read: %v", err)
		}
	})
	t.Run("by the sandbox", func(t *testing.T) {
		got := make(chan error, 1)
		port := serve(t, func(c *net.TCPConn) {
			_, err := io.Copy(io.Discard, c)
			got <- err
		})
		c := g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.5:%d", port))
		c.Write([]byte("x"))
		c.(*net.TCPConn).SetLinger(0)
		c.Close()
		if err := <-got; !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the server read: %v", err)
		}
	})
	t.Run("by a cut", func(t *testing.T) {
		got := make(chan error, 2)
		port := serve(t, func(c *net.TCPConn) {
			c.Write([]byte("x"))
			_, err := io.Copy(io.Discard, c)
			got <- err
		})
		first := g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.5:%d", port))
		second := g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.6:%d", port))
		defer first.Close()
		for _, c := range []net.Conn{first, second} {
			io.ReadFull(c, make([]byte, 1))
		}
		w.Cut(func(tuple Tuple) bool { return tuple.Outside.Addr().String() == "203.0.113.5" })
		if _, err := first.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the one that was cut read: %v", err)
		}
		<-got
		if _, err := second.Write([]byte("y")); err != nil {
			t.Errorf("the other one wrote: %v", err)
		}
		second.Close()
		if err := <-got; err != nil {
			t.Errorf("the other one's server read: %v", err)
		}
	})
	eventually(t, "no connection left", func() bool { return w.Stats().Connections == 0 })
}

// TestBackpressure: a program that does not read stops the writer at the other end.
// Other connections are not affected.
func TestBackpressure(t *testing.T) {
	p, g := newPoller(t), newGuest(t)
	w := attach(t, p, g, &loopback{})
	read := make(chan struct{})
	data := payload(7, 64<<20)
	received := make(chan []byte, 1)
	slow := serve(t, func(c *net.TCPConn) {
		<-read
		b, _ := io.ReadAll(c)
		received <- b
	})
	c := g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.5:%d", slow))
	defer c.Close()
	go func() {
		c.Write(data)
		c.(*net.TCPConn).CloseWrite()
	}()
	other := g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.5:%d", serve(t, echo)))
	defer other.Close()
	if err := exchange(other, payload(8, 4<<20)); err != nil {
		t.Error(err)
	}
	if n := w.Stats().BytesIn; n > 40<<20 {
		t.Errorf("%d bytes came in while nobody read", n)
	}
	close(read)
	if !bytes.Equal(<-received, data) {
		t.Error("other bytes arrived")
	}
}

// TestWindow: a connection may have many bytes under way. If a sandbox is answered
// late, its speed depends on the size of its window.
func TestWindow(t *testing.T) {
	const sent, want = 1 << 20, maxBuffer / 4
	p, g := newPoller(t), newGuest(t)
	defer attach(t, p, g, &loopback{}).Close()
	port := serve(t, func(c *net.TCPConn) {
		if _, err := io.CopyN(io.Discard, c, sent); err == nil {
			c.Write([]byte{1})
		}
	})
	c := g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.5:%d", port))
	defer c.Close()
	if _, err := c.Write(make([]byte, sent)); err != nil {
		t.Fatal(err)
	}
	// The answer comes once everything was read. Its segment announces the window.
	if _, err := c.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.SOL_TCP, unix.TCP_INFO)
		if err != nil || info.Snd_wnd < want {
			t.Errorf("the window has %d bytes, want at least %d; %v", info.Snd_wnd, want, err)
		}
	}); err != nil {
		t.Fatal(err)
	}
}
