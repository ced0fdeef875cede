package agent

import (
	"errors"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// input is the writing side of an exec's standard input.
type input struct {
	file *os.File
	raw  syscall.RawConn
	tty  bool
	turn chan struct{} // cap 1: held by the writer whose turn it is
}

func newInput(file *os.File, tty bool) (*input, error) {
	raw, err := file.SyscallConn()
	if err != nil {
		return nil, err
	}
	return &input{file: file, raw: raw, tty: tty, turn: make(chan struct{}, 1)}, nil
}

// write writes all of p, and waits for room until done or stop closes. Only the
// caller waits.
func (in *input) write(stop, done <-chan struct{}, p []byte) (int, error) {
	select {
	case in.turn <- struct{}{}:
		defer func() { <-in.turn }()
	case <-done:
		return 0, ErrEnded
	case <-stop:
		return 0, ErrStopped
	}
	written := 0
	var err error
	step := func(fd uintptr) bool {
		for written < len(p) {
			var n int
			n, err = unix.Write(int(fd), p[written:])
			if n > 0 {
				written += n
			}
			if err != nil && err != syscall.EINTR {
				return err != syscall.EAGAIN
			}
		}
		err = nil
		return true
	}
	// The first attempt does not wait: usually there is room, and no helper goroutine
	// is needed.
	if closed := in.raw.Control(func(fd uintptr) { step(fd) }); closed != nil {
		return 0, ErrClosed
	}
	if err == syscall.EAGAIN {
		if waitErr := in.wait(stop, step); waitErr != nil {
			return written, waitErr
		}
	}
	switch err {
	case nil:
		return written, nil
	case syscall.EPIPE, syscall.EIO: // the reader, or the terminal's slave, is gone
		return written, ErrClosed
	}
	return written, failed("write", "stdin", err)
}

// wait runs step whenever there is room, until step returns true or stop closes.
func (in *input) wait(stop <-chan struct{}, step func(uintptr) bool) error {
	written, watched := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-stop:
			in.file.SetWriteDeadline(past) // wakes the writer; sets no timer
		case <-written:
		}
	}()
	err := in.raw.Write(step)
	close(written)
	<-watched
	if err == nil {
		return nil
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		in.file.SetWriteDeadline(time.Time{})
		return ErrStopped
	}
	return ErrClosed
}

// close ends the input. A terminal has no half that could be closed: it gets
// the end-of-file character, as from Ctrl-D.
func (in *input) close() error {
	if in.tty {
		var err error
		if in.raw.Control(func(fd uintptr) { _, err = unix.Write(int(fd), []byte{4}) }) != nil || err == syscall.EIO {
			return ErrClosed
		}
		return failed("write", "end of file to terminal", err)
	}
	if in.file.Close() != nil {
		return ErrClosed
	}
	return nil
}
