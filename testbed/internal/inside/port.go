package inside

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"agentrun.dev/testbed/internal/protocol"
)

// port is one virtio-serial port.
//
// Its reads return 0 while no client is connected. That is not the end of the stream:
// the port is watched with edge-triggered epoll (Go's poller), which wakes when the
// next client comes.
type port struct {
	file *os.File
	r    *bufio.Reader

	mu   sync.Mutex // serialises writes, which must not mix frames
	buf  []byte
	gone func() // called by Read when the client has gone
}

func openPort(path string) (*port, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open port %s: %w", path, err)
	}
	p := &port{file: os.NewFile(uintptr(fd), path)}
	p.r = bufio.NewReaderSize(p, 64<<10)
	return p, nil
}

// Read blocks until there are bytes, across clients.
func (p *port) Read(b []byte) (int, error) {
	conn, err := p.file.SyscallConn()
	if err != nil {
		return 0, err
	}
	var n int
	var readErr error
	told := false
	err = conn.Read(func(fd uintptr) bool {
		n, readErr = unix.Read(int(fd), b)
		if n > 0 {
			return true
		}
		switch {
		case readErr == nil:
			if !told && p.gone != nil {
				told = true
				p.gone()
			}
			return false
		case errors.Is(readErr, unix.EAGAIN), errors.Is(readErr, unix.EINTR):
			return false
		}
		return true
	})
	if err != nil {
		return 0, err
	}
	if readErr != nil {
		return 0, fmt.Errorf("read port %s: %w", p.file.Name(), readErr)
	}
	return n, nil
}

// send writes one frame. It blocks while the client does not read, until
// interrupt.
func (p *port) send(t protocol.Type, payload []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.buf = protocol.AppendFrame(p.buf[:0], t, payload)
	_, err := p.file.Write(p.buf)
	return err
}

func (p *port) sendRaw(b []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, err := p.file.Write(b)
	return err
}

// interrupt makes blocked and future sends fail. resume makes them work again.
func (p *port) interrupt() { p.file.SetWriteDeadline(time.Unix(1, 0)) }
func (p *port) resume()    { p.file.SetWriteDeadline(time.Time{}) }

var _ io.Reader = (*port)(nil)
