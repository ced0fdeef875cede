package guestmem

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// MaxPieces is how many ranges ReadMessage and WriteMessage accept: the kernel
// refuses more in one call, and two calls would be two messages.
const MaxPieces = maxIovecs - 1

// WriteMessage sends one message over a socket that preserves message
// boundaries: head, which is host memory, followed by the content of the
// ranges. If it returns an error, it has sent no part of the message. On a
// non-blocking socket the error may be EAGAIN.
func (m *Memory) WriteMessage(fd int, head []byte, ranges []Range) error {
	var few [8][]byte // so that short messages allocate nothing
	iov, want, err := vector(few[:0], head, ranges, m.slice)
	if err != nil {
		return err
	}
	for {
		k, err := unix.Writev(fd, iov)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err == nil && k != want:
			return fmt.Errorf("%d of %d bytes of a message were sent", k, want)
		}
		return err
	}
}

// ReadMessage receives one message over such a socket: its beginning into head,
// which is host memory, the rest into the ranges. It returns the number of
// bytes stored; a longer message is cut off.
func (m *Memory) ReadMessage(fd int, head []byte, ranges []Range) (int, error) {
	c := m.writing()
	defer c.written()
	var few [8][]byte
	iov, _, err := vector(few[:0], head, ranges, func(gpa, n uint64) ([]byte, error) { return m.toWrite(c, gpa, n) })
	if err != nil {
		return 0, err
	}
	for {
		k, err := unix.Readv(fd, iov)
		if !errors.Is(err, unix.EINTR) {
			return max(k, 0), err
		}
	}
}

// vector makes the I/O vector of a message and returns its length in bytes.
func vector(iov [][]byte, head []byte, ranges []Range, access func(gpa, n uint64) ([]byte, error)) ([][]byte, int, error) {
	if len(ranges) > MaxPieces {
		return nil, 0, fmt.Errorf("%w: a message in %d pieces (%d are possible)", ErrRange, len(ranges), MaxPieces)
	}
	iov, n := append(iov, head), len(head)
	for _, r := range ranges {
		b, err := access(r.GPA, uint64(r.Len))
		if err != nil {
			return nil, 0, err
		}
		iov, n = append(iov, b), n+len(b)
	}
	return iov, n, nil
}
