package network

import (
	"bytes"
	"crypto/sha3"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"testing"

	"agentrun.dev/test/soak"
)

// manyAtOnce opens connections, and when all are open, sends and checks other bytes over each.
const manyAtOnce = `
import asyncio, hashlib, resource, socket, struct, sys
host, port, count, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

def text(i, direction):
    return hashlib.shake_128(struct.pack("!IB", i, direction)).digest(size)

async def exchange(i, r, w):
    w.write(text(i, 0))
    got = await r.readexactly(size)
    assert got == text(i, 1), "connection %d got other bytes" % i
    await w.drain()
    assert await r.readexactly(1) == b"k", "the server of connection %d got other bytes" % i
    w.close()

async def main():
    opened = []
    address = socket.gethostbyname(host)  # once: questions have a rate
    for i in range(count):
        r, w = await asyncio.open_connection(address, port)
        w.write(struct.pack("!I", i))
        opened.append((i, r, w))
    await asyncio.gather(*(exchange(*c) for c in opened))
    print("%d connections, all bytes right" % count)

asyncio.run(main())
`

// part is the data that one side of connection i sends.
func part(i uint32, direction byte, size int) []byte {
	return sha3.SumSHAKE128(append(binary.BigEndian.AppendUint32(nil, i), direction), size)
}

// exchange is the other side of one connection of manyAtOnce. open is done when all are open.
func exchange(c net.Conn, size int, open *sync.WaitGroup) error {
	defer func() { _ = c.Close() }()
	var number [4]byte
	_, err := io.ReadFull(c, number[:])
	open.Done()
	if err != nil {
		return err
	}
	open.Wait()
	i := binary.BigEndian.Uint32(number[:])
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(part(i, 1, size))
		sent <- err
	}()
	got := make([]byte, size)
	if _, err := io.ReadFull(c, got); err != nil {
		return fmt.Errorf("connection %d: %w", i, err)
	}
	if err := <-sent; err != nil {
		return fmt.Errorf("connection %d: %w", i, err)
	}
	verdict := "k"
	if !bytes.Equal(got, part(i, 0, size)) {
		verdict, err = "x", fmt.Errorf("connection %d brought other bytes", i)
	}
	if _, writeErr := io.WriteString(c, verdict); writeErr != nil {
		return writeErr
	}
	return err
}

// TestManyConnections: a sandbox has 1,000 connections at a time, with different bytes, and
// each gets its own. If make soak bounds counts, in an emulated machine, there are 200.
func TestManyConnections(t *testing.T) {
	const size = 20 << 10
	count := 1000
	if soak.On() && soak.Count(count, 200) < count {
		count = 200
	}
	s := newSite(t)
	s.memory = "256Mi"
	s.importImage(t, "demo:1", "python.sh")
	s.Name("many.example.org", 60, "25.1.113.40")
	l := s.Listen(t, "25.1.113.40:9001")
	var open, served sync.WaitGroup
	open.Add(count)
	served.Go(func() {
		for range count {
			c, err := l.Accept()
			if err != nil {
				return // closed: the program has failed
			}
			served.Go(func() {
				if err := exchange(c, size, &open); err != nil {
					t.Error(err)
				}
			})
		}
	})
	s.pool(t, "demo", 1, "networkPolicy: {egress: deny, allow: [many.example.org]}")
	s.claim(t, "demo", "a")
	s.prints(t, "a", fmt.Sprintf("%d connections, all bytes right", count), "python3", "-c", manyAtOnce,
		"many.example.org", "9001", strconv.Itoa(count), strconv.Itoa(size))
	if !t.Failed() { // otherwise some goroutines wait for connections that were never opened
		served.Wait()
	}
}
