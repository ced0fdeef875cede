package qemu

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"agentrun.dev/testbed/internal/protocol"
)

// helloLimit bounds the wait for a running VM's answer to a greeting. The previous
// session on the same port is killed first, which takes a moment.
const helloLimit = time.Minute

// Conn is a client's connection to one port.
type Conn struct {
	file *os.File
	lock *os.File // held with flock: one client per port
	r    *bufio.Reader
	in   []byte

	mu  sync.Mutex // protects out and the order of frames
	out []byte
}

// Connect takes a free port of the running VM. If all ports are taken, it waits for
// one.
func (m *VM) Connect(ctx context.Context) (*Conn, error) {
	first := rand.IntN(Ports)
	for i := range Ports {
		port := strconv.Itoa((first + i) % Ports)
		lock, err := lockFile(m.file("port-"+port+".lock"), unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) {
			continue
		} else if err != nil {
			return nil, err
		}
		return m.dialLocked(ctx, port, lock)
	}
	port := strconv.Itoa(first)
	lock, err := lockFile(m.file("port-"+port+".lock"), unix.LOCK_EX)
	if err != nil {
		return nil, err
	}
	return m.dialLocked(ctx, port, lock)
}

func (m *VM) dialLocked(ctx context.Context, port string, lock *os.File) (*Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, helloLimit)
	defer cancel()
	c, err := m.dial(ctx, port)
	if err != nil {
		_ = lock.Close() // only locked
		return nil, fmt.Errorf("the testbed machine does not answer (try: testbed stop): %w", err)
	}
	c.lock = lock
	return c, nil
}

// dial connects to a port and greets.
func (m *VM) dial(ctx context.Context, port string) (*Conn, error) {
	// The socket is reached through the folder's descriptor, because a socket's path
	// has 107 bytes at most.
	dir, err := os.Open(m.state)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	addr := &unix.SockaddrUnix{Name: fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), socketName(port))}
	if err := unix.Connect(fd, addr); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("connect to %s: %w", m.file(socketName(port)), err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, err
	}
	f := os.NewFile(uintptr(fd), m.file(socketName(port)))
	c := &Conn{file: f, r: bufio.NewReaderSize(f, 128<<10), in: make([]byte, protocol.MaxPayload)}
	if err := c.greet(ctx); err != nil {
		_ = f.Close() // the greeting's error says more
		return nil, err
	}
	return c, nil
}

func (c *Conn) greet(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { c.file.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	nonce := protocol.NewNonce()
	if _, err := c.file.Write(protocol.Hello(nonce)); err != nil {
		return fmt.Errorf("greet: %w", err)
	}
	version, err := protocol.ReadAck(c.r, nonce)
	if errors.Is(err, io.EOF) {
		return errors.New("QEMU ended")
	} else if err != nil {
		return fmt.Errorf("wait for the answer to the greeting: %w", err)
	}
	if version != protocol.Version {
		return fmt.Errorf("it was started by another version of the testbed (protocol %d, this one %d): run testbed stop", version, protocol.Version)
	}
	return nil
}

// Send sends one frame.
func (c *Conn) Send(t protocol.Type, payload []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.out = protocol.AppendFrame(c.out[:0], t, payload)
	_, err := c.file.Write(c.out)
	return err
}

// Receive returns the next frame; the payload is valid until the next call.
func (c *Conn) Receive() (protocol.Type, []byte, error) { return protocol.ReadFrame(c.r, c.in) }

// Close returns the port. The server kills the processes that still run for it.
func (c *Conn) Close() error {
	err := c.file.Close()
	if c.lock != nil {
		_ = c.lock.Close() // only locked
	}
	return err
}

func (m *VM) requestPowerOff() error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	c, err := m.dial(ctx, "control")
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.Send(protocol.PowerOff, nil); err != nil {
		return err
	}
	// The end of the VM is the answer. Without waiting for it, our close could
	// overtake the frame.
	c.file.SetReadDeadline(time.Now().Add(5 * time.Second))
	_, _, _ = c.Receive()
	return nil
}
