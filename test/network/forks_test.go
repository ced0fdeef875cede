package network

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/client"
	"agentrun.dev/test/soak"
)

// source sends the same bytes to every client: half of them at once, the other
// half after release.
type source struct {
	bytes    []byte
	half     chan struct{} // gets a value when a client has got half
	released chan struct{}
	release  func()
}

// newSource starts a source on an address of the world.
func (s *site) newSource(t *testing.T, address string, size int) *source {
	t.Helper()
	src := &source{bytes: make([]byte, size), half: make(chan struct{}, 1024), released: make(chan struct{})}
	for i := range src.bytes {
		src.bytes[i] = byte(i ^ i>>8 ^ i>>16)
	}
	src.release = sync.OnceFunc(func() { close(src.released) })
	t.Cleanup(src.release)
	l := s.Listen(t, address)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go src.send(c)
		}
	}()
	return src
}

func (s *source) send(c net.Conn) {
	defer func() { _ = c.Close() }()
	middle := len(s.bytes) / 2
	if _, err := c.Write(s.bytes[:middle]); err != nil {
		return
	}
	s.half <- struct{}{}
	<-s.released
	if _, err := c.Write(s.bytes[middle:]); err != nil {
		return
	}
	_ = c.(*net.TCPConn).CloseWrite()
	_, _ = io.Copy(io.Discard, c) // until the other side has read everything
}

// whole is the report of a reader that has got all bytes.
func (s *source) whole() string {
	sum := sha256.Sum256(s.bytes)
	return fmt.Sprintf("whole %d %s", len(s.bytes), hex.EncodeToString(sum[:]))
}

// readOnly connects to an address and only reads, in the background. When the
// connection has ended, it tells every client of its results port how and when.
const readOnly = `
import errno, hashlib, os, socket, sys, threading, time
name, port, results = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
listener = socket.create_server(("0.0.0.0", results))
s = socket.create_connection((name, port), timeout=60)
s.settimeout(None)
if os.fork():
    os._exit(0)
os.setsid()
null = os.open("/dev/null", os.O_RDWR)
for fd in range(3):
    os.dup2(null, fd)
done, result = threading.Event(), []
def read():
    n, digest = 0, hashlib.sha256()
    try:
        while True:
            b = s.recv(1 << 16)
            if not b:
                result.append("whole %d %s" % (n, digest.hexdigest()))
                break
            n += len(b)
            digest.update(b)
    except OSError as e:
        result.append(errno.errorcode[e.errno])
    result.append(str(time.time()))
    done.set()
threading.Thread(target=read, daemon=True).start()
def answer(c):
    done.wait()
    c.sendall("\n".join(result).encode())
    c.close()
while True:
    c, _ = listener.accept()
    threading.Thread(target=answer, args=(c,), daemon=True).start()
`

// reads starts a readOnly, and returns when the source has sent half of its bytes.
func (s *site) reads(t *testing.T, sandbox string, from *source, port, results string) {
	t.Helper()
	r := s.run(t, sandbox, "python3", "-c", readOnly, "source.example.org", port, results)
	if r.ExitCode != 0 { // else the source would never send half
		t.Fatalf("%s: connect to port %s of source.example.org: exit code %d\n%s", sandbox, port, r.ExitCode, r.Stderr)
	}
	<-from.half
}

// ask prints the answer of a program on a port of the same sandbox.
const ask = `
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=120)
print(s.makefile().read())
`

// outcome waits for the end of a readOnly, and returns how and when it ended.
func (s *site) outcome(t *testing.T, sandbox, port string) (string, time.Time) {
	t.Helper()
	r := s.run(t, sandbox, "python3", "-c", ask, port)
	how, when, _ := strings.Cut(strings.TrimSpace(r.Stdout), "\n")
	seconds, err := strconv.ParseFloat(when, 64)
	if err != nil {
		t.Fatalf("%s: the reader does not say how it ended: %q\n%s", sandbox, r.Stdout, r.Stderr)
	}
	return how, time.UnixMicro(int64(seconds * 1e6))
}

// TestForks: connections stay with the sandbox that has opened them. In children of a
// fork, and in sandboxes that wake from hibernation, they are reset, which even
// programs that only read notice. Listeners continue, and children open their own
// connections. A pause does not end connections.
func TestForks(t *testing.T) {
	s := newSite(t)
	s.importImage(t, "demo:1", "python.sh")
	s.Name("source.example.org", 60, "25.1.113.40")
	s.Name("www.example.org", 60, "25.1.113.41")
	s.ServeHTTP(t, "25.1.113.41:80", hello)
	s.pool(t, "demo", 1, "networkPolicy: {egress: deny, allow: [source.example.org, www.example.org]}")
	s.claim(t, "demo", "a")

	first := s.newSource(t, "25.1.113.40:9001", 8<<20)
	s.reads(t, "a", first, "9001", "8001")
	s.fork(t, "a", "f", 2, nil)
	forked := time.Now()
	for _, child := range []string{"f-1", "f-2"} {
		how, when := s.outcome(t, child, "8001")
		if how != "ECONNRESET" {
			t.Errorf("%s: a program that only reads from an inherited connection: %s; want ECONNRESET", child, how)
		}
		t.Logf("%s: reset %v after the fork had returned", child, when.Sub(forked))
		s.prints(t, child, "hello from www.example.org", "python3", "-c", get, "http://www.example.org/")
	}
	s.do(t, "a", client.Pause)
	first.release() // the bytes wait during the pause
	s.do(t, "a", client.Resume)
	if how, _ := s.outcome(t, "a", "8001"); how != first.whole() {
		t.Errorf("the source's transfer, after a fork and a pause: %s; want %s", how, first.whole())
	}

	second := s.newSource(t, "25.1.113.40:9002", 1<<20)
	s.reads(t, "a", second, "9002", "8002")
	s.do(t, "a", client.Hibernate)
	s.do(t, "a", client.Resume)
	woken := time.Now()
	how, when := s.outcome(t, "a", "8002")
	if how != "ECONNRESET" {
		t.Errorf("a program that only reads, after hibernation: %s; want ECONNRESET", how)
	}
	t.Logf("reset %v after waking had returned", when.Sub(woken))
	s.prints(t, "a", "hello from www.example.org", "python3", "-c", get, "http://www.example.org/")
	// A child of a child, whose source has been hibernated.
	s.fork(t, "f-1", "g", 1, nil)
	s.prints(t, "g-1", "hello from www.example.org", "python3", "-c", get, "http://www.example.org/")
}

// holdOpen opens a connection, and prints the line that the server sends when
// all clients are connected.
const holdOpen = `
import socket
s = socket.create_connection(("meet.example.org", 9000), timeout=300)
print(s.makefile().readline())
`

// TestManyForks: many forks of one sandbox, all with the same addresses, are connected
// at the same time, each by its own connection.
func TestManyForks(t *testing.T) {
	n := soak.Count(100, 10)
	s := newSite(t)
	s.memory = "64Mi"
	s.importImage(t, "demo:1", "python.sh")
	s.Name("meet.example.org", 60, "25.1.113.42")
	s.pool(t, "demo", 1, "networkPolicy: {egress: deny, allow: [meet.example.org]}")
	s.claim(t, "demo", "a")
	l := s.Listen(t, "25.1.113.42:9000")
	all := make(chan struct{})
	go func() {
		for i := range n {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				<-all
				_, _ = fmt.Fprintf(c, "connection %d\n", i)
			}()
		}
		close(all)
	}()
	const batch = 20 // the greatest number for one fork
	children := []string{}
	for len(children) < n {
		name := fmt.Sprintf("f%d", len(children)/batch)
		size := min(batch, n-len(children))
		s.fork(t, "a", name, size, nil)
		for i := range size {
			children = append(children, fmt.Sprintf("%s-%d", name, i+1))
		}
	}
	var wg sync.WaitGroup
	for _, child := range children {
		wg.Go(func() { s.prints(t, child, "connection", "python3", "-c", holdOpen) })
	}
	wg.Wait()
}
