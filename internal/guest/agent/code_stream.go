package agent

import (
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxRest bounds the bytes that are taken beyond the limit of an output when its
// execution ends. It is the capacity of the largest pipe that a user may ask for.
const maxRest = 1 << 20

// interpreterStream is the standard output or error of an interpreter: one pipe. Its
// bytes belong to the execution that runs when they arrive.
type interpreterStream struct {
	file *os.File
	raw  syscall.RawConn
	sink *sink

	mu     sync.Mutex // protects output
	output *Output    // of the running execution; nil: bytes are discarded
}

func newInterpreterStream(file *os.File, s *sink) (*interpreterStream, error) {
	raw, err := file.SyscallConn()
	if err != nil {
		return nil, err
	}
	return &interpreterStream{file: file, raw: raw, sink: s}, nil
}

func (s *interpreterStream) current() *Output {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.output
}

// pump moves bytes until every writer is gone: the interpreter and its children.
func (s *interpreterStream) pump() {
	defer s.file.Close()
	for {
		var o *Output
		var got fillResult
		err := s.raw.Read(func(fd uintptr) bool {
			if o = s.current(); o != nil {
				got = o.fill(int(fd))
			} else {
				got = s.discard(int(fd))
			}
			return got != fillEmpty
		})
		switch {
		case err != nil, got == fillEnd && s.current() == o:
			return
		case got == fillFull:
			<-o.room
		}
	}
}

func (s *interpreterStream) discard(fd int) fillResult {
	switch n, err := s.sink.discard(fd); {
	case n > 0, err == syscall.EINTR:
		return fillMore
	case err == syscall.EAGAIN:
		return fillEmpty
	}
	return fillEnd
}

// begin assigns the bytes that come from now on to an execution.
func (s *interpreterStream) begin(o *Output) {
	s.mu.Lock()
	s.output = o
	s.mu.Unlock()
}

// end gives the execution the bytes that are now in the pipe, and no later bytes. It
// waits for no reader: slow readers get the rest from a larger buffer.
func (s *interpreterStream) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := s.output
	if o == nil {
		return
	}
	s.output = nil
	// An error means that the pump has seen the end and has closed the file.
	_ = s.raw.Control(func(fd uintptr) { o.takeRest(int(fd)) })
	o.finish()
	wake(o.room)
}

// position is how many bytes the execution has written by now.
func (s *interpreterStream) position() int64 {
	o := s.current()
	if o == nil {
		return 0
	}
	at := o.Stats().Bytes
	_ = s.raw.Control(func(fd uintptr) { at = o.position(int(fd)) }) // an error means that the stream has ended
	return at
}

// waiting is how many unread bytes a pipe holds.
func waiting(fd int) int64 {
	n, err := unix.IoctlGetInt(fd, unix.TIOCINQ)
	if err != nil || n < 0 {
		return 0
	}
	return int64(n)
}

// position is the offset of the next byte that will be written to the pipe.
func (o *Output) position(fd int) int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.end + waiting(fd)
}

// takeRest takes the bytes that are in the pipe now, and no more.
func (o *Output) takeRest(fd int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.left = min(waiting(fd), maxRest)
	for {
		switch o.fillLocked(fd) {
		case fillMore:
		case fillFull:
			o.limit = len(o.buf) + int(o.left)
		default:
			return
		}
	}
}
