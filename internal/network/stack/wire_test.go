package stack

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"agentrun.dev/test/soak"
	"golang.org/x/sys/unix"
)

func TestUDP(t *testing.T) {
	p, g := newPoller(t), newGuest(t)
	clock := newManualClock()
	w := attach(t, p, g, &loopback{refuse: 1}, func(c *Config) { c.Clock = clock })
	server, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go func() {
		b := make([]byte, 2000)
		for {
			n, from, err := server.ReadFrom(b)
			if err != nil {
				return
			}
			server.WriteTo(b[:n], from)
		}
	}()
	port := server.LocalAddr().(*net.UDPAddr).Port
	for _, address := range []string{"203.0.113.5", "[2001:db8::5]"} {
		c := g.mustDial(t, "udp", fmt.Sprintf("%s:%d", address, port))
		defer c.Close()
		for _, size := range []int{1, 100, 1400} {
			data := payload(uint64(size), size)
			c.Write(data)
			b := make([]byte, 2000)
			if n, err := c.Read(b); err != nil || !bytes.Equal(b[:n], data) {
				t.Errorf("%s: %d bytes came back of %d: %v", address, n, size, err)
			}
		}
	}
	refused := g.mustDial(t, "udp", "203.0.113.5:1")
	defer refused.Close()
	refused.Write([]byte("x"))
	if _, err := refused.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a refused flow: %v", err)
	}
	closed := g.mustDial(t, "udp", fmt.Sprintf("203.0.113.5:%d", 9))
	defer closed.Close()
	closed.Write([]byte("x"))
	if _, err := closed.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a closed port outside: %v", err)
	}
	if w.Stats().Stack {
		t.Error("UDP made a stack")
	}
	eventually(t, "three flows", func() bool { return w.Stats().Flows == 3 })
	clock.Advance(DefaultLimits.FlowIdle)
	eventually(t, "no flow left", func() bool { return w.Stats().Flows == 0 })
}

func TestDNS(t *testing.T) {
	p, g := newPoller(t), newGuest(t)
	query := append([]byte{0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 'a'}, 0, 0, 1, 0, 1)
	long := bytes.Repeat([]byte("x"), 5000)
	o := &loopback{answers: func(q []byte, tcp bool) []byte {
		if q[1] == 9 {
			return long
		}
		return fmt.Appendf(nil, "%d bytes over tcp: %v", len(q), tcp)
	}}
	attach(t, p, g, o)
	for _, gateway := range []string{"10.255.255.1:53", "[fd00:a9e7::1]:53"} {
		c := g.mustDial(t, "udp", gateway)
		defer c.Close()
		b := make([]byte, 2000)
		c.Write(query)
		if n, _ := c.Read(b); string(b[:n]) != "19 bytes over tcp: false" {
			t.Errorf("%s: answer %q", gateway, b[:n])
		}
		query[1] = 9
		c.Write(query)
		if n, _ := c.Read(b); n != len(query) || b[2] != 0x83 || b[1] != 9 {
			t.Errorf("%s: a long answer came as %x", gateway, b[:n])
		}
		stream := g.mustDial(t, "tcp", gateway)
		defer stream.Close()
		for _, id := range []byte{9, 7, 7} {
			query[1] = id
			stream.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(query))), query...))
			var size [2]byte
			io.ReadFull(stream, size[:])
			answer := make([]byte, binary.BigEndian.Uint16(size[:]))
			io.ReadFull(stream, answer)
			if id == 9 && !bytes.Equal(answer, long) || id == 7 && string(answer) != "19 bytes over tcp: true" {
				t.Errorf("%s: answer of %d bytes to %d over TCP", gateway, len(answer), id)
			}
		}
	}
}

func TestPing(t *testing.T) {
	p, g := newPoller(t), newGuest(t)
	w := attach(t, p, g, &loopback{})
	ping := func(family, protocol int, request, reply byte, to unix.Sockaddr) error {
		return g.Run(func() error {
			s, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
			if err != nil {
				return err
			}
			defer unix.Close(s)
			unix.SetsockoptTimeval(s, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: int64(patience.Seconds())})
			m := []byte{request, 0, 0, 0, 1, 2, 3, 4, 'h', 'i'}
			if family == unix.AF_INET {
				binary.BigEndian.PutUint16(m[2:], ^uint16(0x0800+0x0102+0x0304+0x6869))
			}
			if err := unix.Sendto(s, m, 0, to); err != nil {
				return err
			}
			b := make([]byte, 100)
			for {
				n, _, err := unix.Recvfrom(s, b, 0)
				if err != nil {
					return err
				}
				answer := b[:n]
				if family == unix.AF_INET {
					answer = answer[20:]
				}
				if answer[0] == reply && bytes.Equal(answer[4:], m[4:]) {
					return nil
				}
			}
		})
	}
	if err := ping(unix.AF_INET, unix.IPPROTO_ICMP, 8, 0, &unix.SockaddrInet4{Addr: config.Gateway.As4()}); err != nil {
		t.Errorf("IPv4: %v", err)
	}
	if err := ping(unix.AF_INET6, unix.IPPROTO_ICMPV6, 128, 129, &unix.SockaddrInet6{Addr: config.Gateway6.As16()}); err != nil {
		t.Errorf("IPv6: %v", err)
	}
	if w.Stats().Stack {
		t.Error("a ping made a stack")
	}
}

// TestStackIsFreed: the stack is freed some time after the last connection, and made
// again for the next.
func TestStackIsFreed(t *testing.T) {
	p, g := newPoller(t), newGuest(t)
	clock := newSkippingClock()
	const idle = time.Hour // passes only when it is skipped
	w := attach(t, p, g, &loopback{}, func(c *Config) { c.Clock, c.Limits.StackIdle = clock, idle })
	port := serve(t, echo)
	for range 3 {
		if w.Stats().Stack {
			t.Error("a stack before there is a connection")
		}
		c := g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.5:%d", port))
		if err := exchange(c, payload(1, 1<<20)); err != nil {
			t.Error(err)
		}
		c.Close()
		eventually(t, "no connection left", func() bool { return w.Stats().Connections == 0 })
		if !w.Stats().Stack {
			t.Error("the stack was freed too early")
		}
		clock.Skip(idle)
		eventually(t, "the stack is freed", func() bool { return !w.Stats().Stack })
	}
}

// TestManyWires connects 500 sandboxes with the same address at once.
func TestManyWires(t *testing.T) {
	const wires = 500
	size := soak.Count(100<<10, 20<<10)
	p := newPoller(t)
	port := serve(t, echo)
	conns := make([]net.Conn, wires)
	all := make([]*Wire, wires)
	for i := range conns {
		g := newGuest(t)
		g.KnowGateway(t)
		all[i] = attach(t, p, g, &loopback{})
		conns[i] = g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.5:%d", port))
		defer conns[i].Close()
	}
	var running sync.WaitGroup
	for i, c := range conns {
		running.Go(func() {
			if err := exchange(c, payload(uint64(i), size)); err != nil {
				t.Errorf("sandbox %d: %v", i, err)
			}
		})
	}
	running.Wait()
	for i, w := range all {
		if n := w.Stats().Dropped[DropSpoofed]; n > 0 {
			t.Errorf("sandbox %d: %d spoofed frames", i, n)
		}
	}
}

// TestInherited plays a fork: the same kernel continues on another wire. Programs
// that only read see ECONNRESET, and new connections work.
func TestInherited(t *testing.T) {
	p, g := newPoller(t), newGuest(t)
	port := serve(t, echo)
	source := attach(t, p, g, &loopback{})
	defer source.Close()
	const connections = 200
	conns := make([]net.Conn, connections)
	for i := range conns {
		address := "203.0.113.5"
		if i%2 == 1 {
			address = "[2001:db8::5]"
		}
		conns[i] = g.mustDial(t, "tcp", fmt.Sprintf("%s:%d", address, port))
		defer conns[i].Close()
	}
	mark := source.Mark()
	conns[0].Close() // a connection that ends during the capture may be in it
	eventually(t, "one connection less", func() bool { return source.Stats().Connections == connections-1 })
	tuples := mark.Collect()
	if len(tuples) != connections {
		t.Errorf("%d tuples, want %d", len(tuples), connections)
	}

	g.Disconnect()
	g.Connect(t)
	fork := attach(t, p, g, &loopback{})
	defer fork.Close()
	fork.ResetInherited(tuples)
	for i, c := range conns[1:] {
		c.SetReadDeadline(time.Now().Add(patience))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("connection %d read: %v", i+1, err)
		}
	}
	if fork.Stats().Stack {
		t.Error("resetting inherited connections made a stack")
	}
	c := g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.5:%d", port))
	defer c.Close()
	if err := exchange(c, payload(1, 1<<20)); err != nil {
		t.Errorf("a new connection of the fork: %v", err)
	}
	if n := source.Stats().Connections; n != connections-1 {
		t.Errorf("the source has %d connections left of %d", n, connections-1)
	}
}

// TestTakeOver lets a second stack serve the same wire after the first is gone.
func TestTakeOver(t *testing.T) {
	p, g := newPoller(t), newGuest(t)
	port := serve(t, echo)
	for range 5 {
		w := attach(t, p, g, &loopback{})
		c := g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.5:%d", port))
		transfer := make(chan error, 1)
		go func() {
			data := payload(1, 1<<20)
			for {
				if _, err := c.Write(data); err != nil {
					transfer <- err
					return
				}
			}
		}()
		go io.Copy(io.Discard, c)
		eventually(t, "bytes flow", func() bool { return w.Stats().BytesIn > 1<<20 })
		w.Close()
		second := attach(t, p, g, &loopback{})
		if err := <-transfer; !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
			t.Errorf("the transfer over the first: %v", err)
		}
		c.Close()
		c = g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.5:%d", port))
		if err := exchange(c, payload(2, 1<<20)); err != nil {
			t.Errorf("a connection over the second: %v", err)
		}
		c.Close()
		second.Close()
	}
}

// TestPause: no timer of a paused wire runs. A connection whose other end is silent
// for hours is still alive afterwards, and goes on.
func TestPause(t *testing.T) {
	p, g := newPoller(t), newGuest(t)
	clock := newSkippingClock()
	w := attach(t, p, g, &loopback{}, func(c *Config) { c.Clock = clock })
	data := payload(3, 16<<20)
	begin := make(chan struct{})
	port := serve(t, func(c *net.TCPConn) {
		c.Write([]byte("x"))
		<-begin
		c.Write(data)
	})
	c := g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.5:%d", port))
	defer c.Close()
	io.ReadFull(c, make([]byte, 1))

	// The guest stops, so its wire is not read any more.
	g.Pause()
	w.Pause()
	close(begin)
	sent := w.Stats().FramesOut
	eventually(t, "the wire is written to", func() bool { return w.Stats().FramesOut > sent })
	for range 100 {
		clock.Skip(time.Hour)
		time.Sleep(time.Millisecond) // gives timers time to do harm, if they ran
	}
	w.Resume()
	g.Continue()
	if b, err := io.ReadAll(c); !bytes.Equal(b, data) {
		t.Errorf("%d bytes came of %d: %v", len(b), len(data), err)
	}
}

// TestSlowReader: data that a server has sent before it closed is still there for a
// program inside that reads it much later. If the sandbox's kernel is silent, the
// connection is given up.
func TestSlowReader(t *testing.T) {
	for _, silent := range []bool{false, true} {
		t.Run(fmt.Sprintf("silent %v", silent), func(t *testing.T) {
			p, g := newPoller(t), newGuest(t)
			clock := newSkippingClock()
			w := attach(t, p, g, &loopback{}, func(c *Config) { c.Clock = clock })
			data := payload(5, 600<<10)
			ended := make(chan struct{})
			port := serve(t, func(c *net.TCPConn) {
				c.Write(data)
				c.CloseWrite()
				io.Copy(io.Discard, c)
				close(ended)
			})
			c := g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.5:%d", port))
			defer c.Close()
			c.(*net.TCPConn).CloseWrite()
			<-ended
			if silent {
				g.Pause()
				defer g.Continue()
			}
			if silent {
				eventually(t, "no connection left", func() bool {
					clock.Skip(10 * time.Second)
					return w.Stats().Connections == 0
				})
				return
			}
			for range 20 {
				heard := segments(w)
				clock.Skip(20 * time.Second) // the longest time between two probes
				eventually(t, "a probe is answered", func() bool { return segments(w) > heard })
			}
			if b, err := io.ReadAll(c); !bytes.Equal(b, data) {
				t.Errorf("%d bytes came of %d: %v", len(b), len(data), err)
			}
		})
	}
}

// segments is how many segments the sandbox has sent on the wire's connections.
func segments(w *Wire) (n uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.conns {
		n += c.inside.segments()
	}
	return n
}

// TestLimits: a sandbox that exceeds its limits is refused.
func TestLimits(t *testing.T) {
	p, g := newPoller(t), newGuest(t)
	o := &loopback{block: 3, dials: make(chan netip.AddrPort, 10)}
	w := attach(t, p, g, o, func(c *Config) { c.Limits = Limits{Connections: 3, Opening: 1} })
	port := serve(t, echo)
	blocked := make(chan error, 1)
	go func() {
		_, err := g.dial("tcp", "203.0.113.5:3")
		blocked <- err
	}()
	<-o.dials
	// One connection is being dialled. The next SYN is dropped until the first has
	// ended.
	second := make(chan net.Conn, 1)
	go func() {
		c, _ := g.dial("tcp", fmt.Sprintf("203.0.113.5:%d", port))
		second <- c
	}()
	eventually(t, "a SYN is dropped", func() bool { return w.Stats().Dropped[DropLimit] > 0 })
	w.Cut(func(t Tuple) bool { return t.Outside.Port() == 3 })
	if err := <-blocked; !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("the dial that was cut: %v", err)
	}
	eventually(t, "nothing is left of it", func() bool { return !hasPort(w, 3) })
	conns := []net.Conn{<-second}
	for range 2 {
		conns = append(conns, g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.5:%d", port)))
	}
	if _, err := g.dial("tcp", fmt.Sprintf("203.0.113.5:%d", port)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("one connection too many: %v", err)
	}
	for _, c := range conns {
		if err := exchange(c, payload(1, 1000)); err != nil {
			t.Error(err)
		}
		c.Close()
	}
}

// hasPort reports whether the wire has a connection to this port outside.
func hasPort(w *Wire, port uint16) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for t := range w.conns {
		if t.Outside.Port() == port {
			return true
		}
	}
	return false
}

// TestRate: both directions keep to their rates. A busy host only makes them slower.
func TestRate(t *testing.T) {
	const rate, size = 8 << 20, 4 << 20
	for _, test := range []struct {
		name     string
		up, down int64
	}{{"up", rate, 0}, {"down", 0, rate}} {
		t.Run(test.name, func(t *testing.T) {
			p, g := newPoller(t), newGuest(t)
			port := serve(t, echo)
			clock := newClock(nil)
			attach(t, p, g, &loopback{}, func(c *Config) { c.Clock, c.Limits.Up, c.Limits.Down = clock, test.up, test.down })
			c := g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.5:%d", port))
			defer c.Close()
			start := clock.NowMonotonic()
			if err := exchange(c, payload(1, size)); err != nil {
				t.Error(err)
			}
			// The bytes of a twentieth of a second pass at once, and the debt of the
			// last frame is not paid.
			const least = (size - rate/20 - 2<<16) * time.Second / rate
			if passed := clock.NowMonotonic().Sub(start); passed < least {
				t.Errorf("%d bytes passed in %v, in less than %v", size, passed, least)
			}
		})
	}
}

// TestNothingIsLeft closes wires in the middle of everything, and checks descriptors,
// memory and goroutines.
func TestNothingIsLeft(t *testing.T) {
	p, g := newPoller(t), newGuest(t)
	o := &loopback{block: 3}
	port := serve(t, echo)
	round := func() {
		w := attach(t, p, g, o)
		var running sync.WaitGroup
		for range 4 {
			c := g.mustDial(t, "tcp", fmt.Sprintf("203.0.113.5:%d", port))
			running.Go(func() {
				defer c.Close()
				data := make([]byte, 1<<20)
				for {
					if _, err := c.Write(data); err != nil {
						return
					}
				}
			})
			running.Go(func() { io.Copy(io.Discard, c) })
		}
		u := g.mustDial(t, "udp", fmt.Sprintf("203.0.113.5:%d", port))
		u.Write([]byte("x"))
		running.Go(func() { g.dial("tcp", "203.0.113.5:3") })
		eventually(t, "all of it goes on", func() bool {
			s := w.Stats()
			return s.Connections >= 5 && s.Flows == 1 && s.BytesIn > 1<<20
		})
		w.Close()
		w.Close()
		u.Close()
		// A second wire resets the guest's connections.
		second := attach(t, p, g, &loopback{refuse: 3})
		running.Wait()
		second.Close()
	}
	descriptors := func() int {
		all, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	round()
	before, memory := descriptors(), heap()
	for range soak.Count(10, 4) {
		round()
	}
	// The server's connections end a moment later.
	eventually(t, "as many descriptors as before", func() bool { return descriptors() <= before })
	eventually(t, "no more memory than before", func() bool { return int64(heap())-int64(memory) < 4<<20 })
}
