package netctl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/network/networktest"
	"golang.org/x/sys/unix"
)

// played listens at a path, as a netd does, and passes each connection to serve.
func played(t *testing.T, serve func(c *Conn)) string {
	t.Helper()
	// The path is longer than a socket's path may be.
	dir := filepath.Join(t.TempDir(), strings.Repeat("long", 30))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "control")
	file, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.FileListener(file)
	if err != nil {
		t.Fatal(err)
	}
	_ = file.Close() // l has its own copy
	var all sync.WaitGroup
	all.Go(func() {
		for {
			s, err := l.Accept()
			if err != nil {
				return
			}
			c := NewConn(s.(*net.UnixConn))
			all.Go(func() {
				serve(c)
				_ = c.Close()
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		all.Wait()
	})
	return path
}

// welcome answers the Hello of a connection.
func welcome(t *testing.T, c *Conn) {
	t.Helper()
	if m, _, err := c.Receive(time.Time{}); err != nil || m.kind() != KindHello {
		t.Errorf("received %+v, %v", m, err)
	}
	if err := c.Send(time.Time{}, &Welcome{Protocol: Protocol, PID: 1}, nil); err != nil {
		t.Error(err)
	}
}

func connect(t *testing.T, path string) *Client {
	t.Helper()
	c, err := Dial(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// TestConcurrentCalls: each reply reaches its caller, in any order.
func TestConcurrentCalls(t *testing.T) {
	c := connect(t, played(t, func(c *Conn) {
		welcome(t, c)
		var held []*Reply
		for {
			m, _, err := c.Receive(time.Time{})
			if err != nil {
				return
			}
			r := m.(*OfWire)
			if held = append(held, Fail(r.ID, fmt.Errorf("%w: %s", ErrNotFound, r.Wire))); len(held) < 4 {
				continue
			}
			for i := range held {
				if err := c.Send(time.Time{}, held[len(held)-1-i], nil); err != nil {
					t.Error(err)
				}
			}
			held = nil
		}
	}))
	var all sync.WaitGroup
	for i := range 64 {
		all.Go(func() {
			name := ID(fmt.Sprint("wire-", i))
			err := c.Pause(t.Context(), name)
			if !errors.Is(err, ErrNotFound) || !strings.HasSuffix(err.Error(), string(name)) {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
	all.Wait()
}

// TestBroken: when a netd ends, all waiting and all later calls fail.
func TestBroken(t *testing.T) {
	received := make(chan struct{})
	end := make(chan struct{})
	c := connect(t, played(t, func(c *Conn) {
		welcome(t, c)
		for range 8 {
			if _, _, err := c.Receive(time.Time{}); err != nil {
				t.Error(err)
			}
			received <- struct{}{}
		}
		<-end
	}))
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			if err := c.Pause(t.Context(), "w"); !errors.Is(err, ErrBroken) {
				t.Errorf("a request to a netd that ended: %v", err)
			}
		})
	}
	for range 8 {
		<-received
	}
	close(end)
	all.Wait()
	<-c.Done()
	if _, err := c.List(t.Context()); !errors.Is(err, ErrBroken) {
		t.Errorf("a request after that: %v", err)
	}
}

// TestDeadline: a call that gives up gets no reply, and a call without any time left
// sends nothing. The connection goes on.
func TestDeadline(t *testing.T) {
	received, given := make(chan struct{}), make(chan struct{})
	c := connect(t, played(t, func(c *Conn) {
		welcome(t, c)
		first, _, err := c.Receive(time.Time{})
		if err != nil {
			t.Error(err)
			return
		}
		close(received)
		<-given
		second, _, err := c.Receive(time.Time{})
		if err != nil {
			t.Error(err)
			return
		}
		for _, m := range []Message{first, second} {
			if err := c.Send(time.Time{}, &Reply{ID: m.(Request).RequestID()}, nil); err != nil {
				t.Error(err)
			}
		}
		_, _, _ = c.Receive(time.Time{})
	}))
	late, end := context.WithDeadline(t.Context(), time.Unix(1, 0))
	defer end()
	if err := c.Pause(late, "w"); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrBroken) {
		t.Errorf("without any time: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-received
		cancel()
	}()
	if err := c.Pause(ctx, "w"); !errors.Is(err, context.Canceled) {
		t.Errorf("a netd that does not answer: %v", err)
	}
	close(given)
	if err := c.Pause(t.Context(), "w"); err != nil {
		t.Error(err)
	}
}

// TestStuck: if a netd does not read, and the deadline of a partly sent request
// passes, the connection breaks.
func TestStuck(t *testing.T) {
	end := make(chan struct{})
	c := connect(t, played(t, func(c *Conn) {
		welcome(t, c)
		<-end
	}))
	defer close(end)
	large := strings.Repeat("x", 200<<10)
	for {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		err := c.SetPolicy(ctx, "w", Rules{Policies: large})
		cancel()
		if errors.Is(err, ErrBroken) {
			break
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
	}
	<-c.Done()
}

// TestHostileNetd: any invalid message of a netd breaks its connection.
func TestHostileNetd(t *testing.T) {
	frame := func(m Message) []byte {
		b := Marshal(m)
		return append(binary.LittleEndian.AppendUint32(nil, uint32(len(b))), b...)
	}
	for name, bytes := range map[string][]byte{
		"nothing":              {},
		"half a size":          {1, 0},
		"an empty message":     {0, 0, 0, 0},
		"a huge message":       {0xff, 0xff, 0xff, 0xff},
		"half a message":       {9, 0, 0, 0, byte(KindReply), 1},
		"rubbish":              []byte("HTTP/1.1 400 Bad Request\r\n\r\n"),
		"a request":            frame(&Simple{KindList, 1}),
		"another Welcome":      frame(&Welcome{Protocol: Protocol}),
		"an answer to nobody":  frame(&Reply{ID: 1000}),
		"an answer to Hello":   frame(&Reply{ID: 0}),
		"an answer too long":   frame(&Reply{ID: 1, Data: make([]byte, MaxMessage)}),
		"a half decoded reply": append(binary.LittleEndian.AppendUint32(nil, 3), byte(KindReply), 1, 0x80),
	} {
		t.Run(name, func(t *testing.T) {
			path := played(t, func(c *Conn) {
				welcome(t, c)
				if _, _, err := c.Receive(time.Time{}); err != nil {
					t.Error(err)
				}
				_, _ = c.socket.Write(bytes) // the client may have closed the connection
				if name != "an answer too long" {
					_ = c.socket.CloseWrite()
				}
				_, _, _ = c.Receive(time.Time{}) // until the client has closed it
			})
			c := connect(t, path)
			if _, err := c.List(t.Context()); !errors.Is(err, ErrBroken) {
				t.Errorf("a netd that says so: %v", err)
			}
		})
	}
	t.Run("a descriptor", func(t *testing.T) {
		c := connect(t, played(t, func(c *Conn) {
			welcome(t, c)
			_, _, _ = c.Receive(time.Time{})
			if err := c.Send(time.Time{}, &Attach{ID: 1}, os.Stdin); err != nil {
				t.Error(err)
			}
			_, _, _ = c.Receive(time.Time{})
		}))
		before := descriptors(t)
		if _, err := c.List(t.Context()); !errors.Is(err, ErrBroken) {
			t.Errorf("a netd that sends descriptors: %v", err)
		}
		if after := descriptors(t); after > before {
			t.Errorf("%d descriptors, %d before", after, before)
		}
	})
	t.Run("a result that is none", func(t *testing.T) {
		c := connect(t, played(t, func(c *Conn) {
			welcome(t, c)
			_, _, _ = c.Receive(time.Time{})
			if err := c.Send(time.Time{}, &Reply{ID: 1, Data: []byte{1, 5, 5}}, nil); err != nil {
				t.Error(err)
			}
			_, _, _ = c.Receive(time.Time{})
		}))
		if all, err := c.List(t.Context()); err == nil {
			t.Errorf("decoded as %+v", all)
		}
	})
}

func descriptors(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// TestHello: both sides must speak the same protocol, and a netd may refuse.
func TestHello(t *testing.T) {
	for name, tt := range map[string]struct {
		answer Message
		says   string
	}{
		"another protocol": {&Welcome{Protocol: 1}, "it speaks protocol 1, this daemon 3"},
		"a refusal":        {&Welcome{Protocol: Protocol, Refused: "you are user 7"}, "you are user 7"},
		"another message":  {&Reply{}, "kind 65"},
	} {
		path := played(t, func(c *Conn) {
			_, _, _ = c.Receive(time.Time{})
			if err := c.Send(time.Time{}, tt.answer, nil); err != nil {
				t.Error(err)
			}
		})
		if _, err := Dial(t.Context(), path); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	end := make(chan struct{})
	path := played(t, func(c *Conn) { <-end })
	defer close(end)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	// The time may be over before the connection is made, or while Dial waits for the
	// answer.
	if _, err := Dial(ctx, path); !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a netd that says nothing: %v", err)
	}
	if _, err := Dial(t.Context(), filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a netd that is not there: %v", err)
	}
}

func socketPair(t *testing.T) (a, b *Conn) {
	t.Helper()
	return socketPairOf(t, unix.SOCK_STREAM)
}

func socketPairOf(t *testing.T, kind int) (a, b *Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	both := [2]*Conn{}
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
		both[i] = NewConn(c.(*net.UnixConn))
		t.Cleanup(func() { _ = both[i].Close() })
	}
	return both[0], both[1]
}

// TestDescriptors: one descriptor comes with each Attach, however long, and with no
// other message.
func TestDescriptors(t *testing.T) {
	a, b := socketPair(t)
	long := &Attach{1, Wire{ID: "w", Lineage: Lineage{Tuples: make([]Tuple, MaxTuples)}}}
	sent := make(chan error, 1)
	go func() {
		for range 3 {
			if err := a.Send(time.Time{}, long, os.Stdin); err != nil {
				sent <- err
				return
			}
		}
		sent <- nil
	}()
	for range 3 {
		m, file, err := b.Receive(time.Time{})
		if err != nil || file == nil || len(m.(*Attach).Lineage.Tuples) != MaxTuples {
			t.Fatalf("received with %v, %v", file, err)
		}
		_ = file.Close()
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	before := descriptors(t)
	for name, tt := range map[string]struct {
		m    Message
		with []int
	}{
		"an Attach without one": {long, nil},
		"another with one":      {&Simple{KindList, 1}, []int{0}},
		"two":                   {&Attach{1, Wire{}}, []int{0, 1}},
		"many":                  {&Attach{1, Wire{}}, make([]int, 200)},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := socketPair(t)
			m := Marshal(tt.m)
			bytes := append(binary.LittleEndian.AppendUint32(nil, uint32(len(m))), m...)
			var rights []byte
			if tt.with != nil {
				rights = unix.UnixRights(tt.with...)
			}
			go func() {
				n, _, _ := a.socket.WriteMsgUnix(bytes, rights, nil)
				_, _ = a.socket.Write(bytes[n:])
			}()
			if m, file, err := b.Receive(time.Time{}); err == nil || file != nil {
				t.Errorf("received %+v with %v", m, file)
			}
		})
	}
	if after := descriptors(t); after > before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

// TestSendsOnce: a message is sent as a whole, with its descriptor or without. Once
// it has arrived, its sender has no step left that could fail. Packets show each
// write.
func TestSendsOnce(t *testing.T) {
	a, b := socketPairOf(t, unix.SOCK_SEQPACKET)
	for name, with := range map[string]*os.File{"with a descriptor": os.Stdin, "without": nil} {
		m := &Attach{1, Wire{ID: "w"}}
		if err := a.Send(time.Time{}, m, with); err != nil {
			t.Fatal(err)
		}
		packet := make([]byte, 1024)
		if n, _, _, _, err := b.socket.ReadMsgUnix(packet, nil); err != nil || n != headerSize+len(Marshal(m)) {
			t.Errorf("%s: the first write has %d bytes, %v", name, n, err)
		}
		raw, err := b.socket.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		err = raw.Control(func(fd uintptr) {
			if n, _, err := unix.Recvfrom(int(fd), packet, unix.MSG_DONTWAIT); !errors.Is(err, unix.EAGAIN) {
				t.Errorf("%s: there is a second write, of %d bytes, %v", name, n, err)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestNoDescriptorLeft: a process that can have no further descriptor receives an
// Attach without it, and the connection goes on.
func TestNoDescriptorLeft(t *testing.T) {
	a, b := socketPair(t)
	wire, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = wire.Close() }()
	restore := networktest.NoDescriptors(t)
	for id, m := range []Message{&Attach{1, Wire{ID: "w"}}, &Simple{KindList, 2}} {
		var with *os.File
		if id == 0 {
			with = wire
		}
		if err := a.Send(time.Time{}, m, with); err != nil {
			t.Fatal(err)
		}
	}
	m, file, err := b.Receive(time.Time{})
	if attach, ok := m.(*Attach); !ok || attach.Wire.ID != "w" || file != nil || !errors.Is(err, ErrNoDescriptor) || !errors.Is(err, ErrBusy) {
		t.Errorf("received %+v with %v, %v", m, file, err)
	}
	restore()
	if m, _, err := b.Receive(time.Time{}); err != nil || m.(Request).RequestID() != 2 {
		t.Errorf("the next message: %+v, %v", m, err)
	}
	if err := a.Send(time.Time{}, &Attach{3, Wire{ID: "w"}}, wire); err != nil {
		t.Fatal(err)
	}
	if _, file, err = b.Receive(time.Time{}); err != nil || file == nil {
		t.Fatalf("with room again: %v, %v", file, err)
	}
	_ = file.Close()
}

func TestConnEnds(t *testing.T) {
	a, b := socketPair(t)
	if b.Gone() {
		t.Error("the other end is said to be gone")
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if !b.Gone() || !a.Gone() {
		t.Error("an end that was closed is said to be there")
	}
	if _, _, err := b.Receive(time.Time{}); !errors.Is(err, io.EOF) {
		t.Errorf("receive after the peer closed: %v, want EOF", err)
	}
	if err := b.Send(time.Time{}, &Simple{KindList, 1}, nil); err == nil {
		t.Error("sent to nobody")
	}
	c, _ := socketPair(t)
	if err := c.Send(time.Time{}, &Reply{Data: make([]byte, MaxMessage)}, nil); !errors.Is(err, ErrInvalid) {
		t.Errorf("an oversized message: %v", err)
	}
	if uid, err := c.PeerUID(); err != nil || int(uid) != os.Getuid() {
		t.Errorf("the peer is user %d, %v", uid, err)
	}
}

// TestListener: a listening socket has the user id of its maker.
func TestListener(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control")
	file, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.FileListener(file)
	if err := errors.Join(err, file.Close()); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if uid, err := ListenerUID(l.(*net.UnixListener)); err != nil || int(uid) != os.Getuid() {
		t.Errorf("user %d listens, %v", uid, err)
	}
	if _, err := Listen(path); err == nil {
		t.Error("two listen at one path")
	}
}
