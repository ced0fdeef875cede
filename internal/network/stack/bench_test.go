package stack

import (
	"fmt"
	"io"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/network/networktest"
)

// cpu is the processor time of this process, including the guest's kernel.
func cpu() time.Duration {
	var r unix.Rusage
	unix.Getrusage(unix.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// BenchmarkThroughput moves bytes over one and over a hundred connections, in both
// directions, and over the host's loopback for comparison.
func BenchmarkThroughput(b *testing.B) {
	for _, connections := range []int{1, 100} {
		for _, up := range []bool{true, false} {
			for _, wired := range []bool{false, true} {
				direction, over := "down", "loopback"
				if up {
					direction = "up"
				}
				if wired {
					over = "wire"
				}
				b.Run(fmt.Sprintf("%d/%s/%s", connections, direction, over), func(b *testing.B) {
					throughput(b, connections, up, wired)
				})
			}
		}
	}
}

// throughput moves 1 MiB per iteration.
func throughput(b *testing.B, connections int, up, wired bool) {
	each := b.N << 20 / connections
	send := func(c net.Conn) {
		data := make([]byte, 256<<10)
		for left := each; left > 0; {
			n, err := c.Write(data[:min(left, len(data))])
			if err != nil {
				b.Error(err)
				return
			}
			left -= n
		}
		c.(*net.TCPConn).CloseWrite()
	}
	receive := func(c net.Conn) {
		buffer := make([]byte, 256<<10)
		n := 0
		for {
			m, err := c.Read(buffer)
			if n += m; err == io.EOF {
				break
			} else if err != nil {
				b.Error(err)
				return
			}
		}
		if n != each {
			b.Errorf("%d bytes of %d", n, each)
		}
	}
	dial := func(address string) (net.Conn, error) { return net.Dial("tcp", address) }
	host := "127.0.0.1"
	var p *Poller
	var g guest
	if wired {
		p, g = newPoller(b), newGuest(b)
		dial = func(address string) (net.Conn, error) { return g.dial("tcp", address) }
		host = "203.0.113.5"
	}
	inside, outside := receive, send
	if up {
		inside, outside = send, receive
	}
	start := make(chan struct{})
	port := serve(b, func(c *net.TCPConn) {
		<-start
		outside(c)
		io.Copy(io.Discard, c)
	})
	if wired {
		defer attach(b, p, g, &loopback{}).Close()
	}
	conns := make([]net.Conn, connections)
	for i := range conns {
		c, err := dial(fmt.Sprintf("%s:%d", host, port))
		if err != nil {
			b.Fatal(err)
		}
		conns[i] = c
	}
	b.SetBytes(1 << 20)
	b.ResetTimer()
	before := cpu()
	close(start)
	var all sync.WaitGroup
	for _, c := range conns {
		all.Go(func() {
			inside(c)
			if up { // the end comes once the server has read everything
				c.Read(make([]byte, 1))
			}
			c.Close()
		})
	}
	all.Wait()
	b.StopTimer()
	gigabytes := float64(each) * float64(connections) / 1e9
	b.ReportMetric((cpu()-before).Seconds()/gigabytes, "cpu-s/GB")
}

// BenchmarkConnect opens and closes connections one after the other.
func BenchmarkConnect(b *testing.B) {
	p, g := newPoller(b), newGuest(b)
	port := serve(b, echo)
	defer attach(b, p, g, &loopback{}).Close()
	b.ReportAllocs()
	err := g.Run(func() error {
		for b.Loop() {
			c, err := net.Dial("tcp", fmt.Sprintf("203.0.113.5:%d", port))
			if err != nil {
				return err
			}
			c.Close()
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
}

// BenchmarkRoundTrip sends a byte and waits for it to come back.
func BenchmarkRoundTrip(b *testing.B) {
	p, g := newPoller(b), newGuest(b)
	port := serve(b, echo)
	defer attach(b, p, g, &loopback{}).Close()
	c := g.mustDial(b, "tcp", fmt.Sprintf("203.0.113.5:%d", port))
	defer c.Close()
	var buffer [1]byte
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Write(buffer[:]); err != nil {
			b.Fatal(err)
		}
		if _, err := c.Read(buffer[:]); err != nil {
			b.Fatal(err)
		}
	}
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}

// TestIdleWireIsSmall measures the memory of an idle wire.
func TestIdleWireIsSmall(t *testing.T) {
	const wires, limit = 500, 4 << 10
	p := newPoller(t)
	fds := make([]int, wires)
	for i := range fds {
		_, far := networktest.NewWire(t)
		fds[i] = dup(t, far)
	}
	before := heap()
	goroutines := runtime.NumGoroutine()
	all := make([]*Wire, wires)
	for i, fd := range fds {
		w, err := p.Attach(fd, config, &loopback{})
		if err != nil {
			t.Fatal(err)
		}
		all[i] = w
	}
	each := (int64(heap()) - int64(before)) / wires
	t.Logf("an idle wire costs %d bytes", each)
	if each > limit {
		t.Errorf("an idle wire costs %d bytes, more than %d", each, limit)
	}
	if n := runtime.NumGoroutine(); n > goroutines {
		t.Errorf("%d goroutines more", n-goroutines)
	}
	runtime.KeepAlive(all)
}
