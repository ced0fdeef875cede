package agent

import (
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	firstBuffer = 4 << 10
	// maxReaders bounds how many connections may follow one stream.
	maxReaders = 16
	// terminalTail bounds what is taken from a terminal after its process has
	// ended. The kernel's own bound is 64 KiB of flip buffers plus 4 KiB.
	terminalTail = 256 << 10
	// FromEnd attaches a reader after the last byte, to read later bytes only.
	FromEnd = int64(-1)
)

// Output is everything that a process has written to one stream: a bounded log with
// absolute offsets. Its bytes go straight from the pipe into the ring.
//
// While a reader is attached nothing is lost. When the ring is full and the slowest
// reader has not yet consumed its oldest byte, the pipe is not read, and the process
// blocks as on any pipe. While no reader is attached, new bytes displace the oldest,
// and the process never blocks. Consumed bytes stay until they are overwritten, so a
// reader that lost its connection can come back for them.
//
// The stream ends when every writer has closed it. It also ends when the exec's own
// process has ended and the bytes then in the pipe have been taken. A background
// child that still holds the stream after that is neither waited for nor killed by
// SIGPIPE. Its later output is read and discarded.
type Output struct {
	file *os.File // read end, or the terminal's master
	raw  syscall.RawConn
	tty  bool
	sink *sink
	room chan struct{} // cap 1: a reader made room, or the process ended

	mu       sync.Mutex // protects all following fields
	buf      []byte     // ring: the byte at offset o lives at o mod len
	limit    int
	start    int64 // offset of the oldest kept byte
	end      int64 // offset after the newest byte
	consumed int64 // highest offset any reader has consumed
	dropped  int64 // bytes overwritten before any reader consumed them
	left     int64 // bytes still to be taken after the process has ended; -1 before its end
	eof      bool
	readers  []*Reader
}

// OutputStats counts the bytes of a stream. The counters are final once EOF is true.
type OutputStats struct {
	Bytes   int64 // written by the process
	Dropped int64 // of these, lost before any reader consumed them
	Start   int64 // offset of the oldest byte still kept
	EOF     bool
}

func newOutput(file *os.File, limit int, tty bool, sink *sink) (*Output, error) {
	raw, err := file.SyscallConn()
	if err != nil {
		return nil, err
	}
	return &Output{file: file, raw: raw, tty: tty, sink: sink, room: make(chan struct{}, 1), limit: limit, left: -1}, nil
}

// Stats returns the current counters.
func (o *Output) Stats() OutputStats {
	o.mu.Lock()
	defer o.mu.Unlock()
	return OutputStats{Bytes: o.end, Dropped: o.dropped, Start: o.start, EOF: o.eof}
}

type fillResult uint8

const (
	fillMore  fillResult = iota // took some bytes; there may be more
	fillEmpty                   // the pipe is empty and still open
	fillFull                    // no room until a reader consumes
	fillEnd                     // the stream has ended; the pipe may be open
)

// pump moves bytes from the pipe to the ring until the stream ends.
func (o *Output) pump() {
	var got fillResult
	step := func(fd uintptr) bool {
		got = o.fill(int(fd))
		return got != fillEmpty
	}
	for got != fillEnd {
		if o.raw.Read(step) != nil {
			// ended woke this goroutine: the pipe was empty, or ended has emptied it.
			break
		}
		if got == fillFull {
			<-o.room
		}
	}
	o.finish()
	o.sink.swallow(o.file, o.raw)
}

// fill takes the bytes of one read. The read never blocks, so it may happen under the
// mutex, straight into the ring.
func (o *Output) fill(fd int) fillResult {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.fillLocked(fd)
}

func (o *Output) fillLocked(fd int) fillResult {
	if o.eof || o.left == 0 {
		o.endLocked()
		return fillEnd
	}
	if o.buf == nil {
		// The ring is made with the first byte, since most streams of most execs stay
		// silent.
		var first [256]byte
		got, n := o.take(fd, first[:])
		if got == fillMore {
			o.buf = make([]byte, min(firstBuffer, o.limit))
			o.commit(copy(o.buf, first[:n]))
		}
		return got
	}
	free := o.freeLocked()
	if free == 0 && len(o.buf) < o.limit {
		o.growLocked()
		free = o.freeLocked()
	}
	if free == 0 {
		return fillFull
	}
	at := int(o.end % int64(len(o.buf)))
	got, n := o.take(fd, o.buf[at:min(at+free, len(o.buf))])
	o.commit(n)
	return got
}

// freeLocked is how many bytes may be written: up to the place of the slowest reader.
// Without a reader it is the whole ring, once that cannot grow.
func (o *Output) freeLocked() int {
	size := int64(len(o.buf))
	if size < int64(o.limit) {
		return int(size - (o.end - o.start))
	}
	slowest := o.end
	for _, r := range o.readers {
		slowest = min(slowest, r.next)
	}
	return int(size - (o.end - slowest))
}

func (o *Output) growLocked() {
	bigger := make([]byte, min(2*len(o.buf), o.limit))
	for off := o.start; off < o.end; {
		src := o.kept(off)
		copy(bigger[off%int64(len(bigger)):], src)
		if room := len(bigger) - int(off%int64(len(bigger))); len(src) > room {
			src = src[:room]
		}
		off += int64(len(src))
	}
	o.buf = bigger
}

// kept returns the contiguous bytes from offset on.
func (o *Output) kept(off int64) []byte {
	at := int(off % int64(len(o.buf)))
	return o.buf[at:min(at+int(o.end-off), len(o.buf))]
}

// take reads once into p, and never more than o.left.
func (o *Output) take(fd int, p []byte) (fillResult, int) {
	if o.left >= 0 && int64(len(p)) > o.left {
		p = p[:o.left]
	}
	for {
		n, err := unix.Read(fd, p)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN && o.left < 0:
			return fillEmpty, 0
		case err == syscall.EIO && o.tty && o.left < 0:
			// No process has the terminal open, but the process lives: it may be
			// about to exit, or to open /dev/tty again. Closing the master would kill
			// it with SIGHUP.
			return fillEmpty, 0
		case n <= 0:
			// 0 is the end of a pipe. EIO is the end of a terminal without a slave.
			// EAGAIN is the end of a stream whose process has ended. No other error
			// can be repaired by reading again.
			o.endLocked()
			return fillEnd, 0
		}
		if o.left >= 0 {
			o.left -= int64(n)
		}
		return fillMore, n
	}
}

// commit counts n bytes that are now in the ring, and the bytes that they overwrote.
func (o *Output) commit(n int) {
	if n == 0 {
		return
	}
	o.end += int64(n)
	if start := o.end - int64(len(o.buf)); start > o.start {
		if lost := start - max(o.start, o.consumed); lost > 0 {
			o.dropped += lost
		}
		o.start = start
	}
	o.wakeReaders()
}

func (o *Output) wakeReaders() {
	for _, r := range o.readers {
		wake(r.ready)
	}
}

func (o *Output) endLocked() {
	if !o.eof {
		o.eof = true
		o.wakeReaders()
	}
}

func (o *Output) finish() {
	o.mu.Lock()
	o.endLocked()
	o.mu.Unlock()
}

// ended is called when the process has been reaped. It takes the bytes that are in
// the pipe at this moment, as far as there is room. So the counters are final at the
// end of the exec if no reader is attached. The bytes that do not fit because of an
// attached reader are left to the pump. The pump takes no more bytes than the pipe
// holds now, so a background child that writes without end cannot keep the stream
// open.
func (o *Output) ended() {
	_ = o.raw.Control(func(fd uintptr) { // an error means that the pump has seen the end
		o.mu.Lock()
		defer o.mu.Unlock()
		o.left = terminalTail
		if !o.tty {
			n, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ)
			if err != nil {
				n = 0
			}
			o.left = int64(n)
		}
		for o.fillLocked(int(fd)) == fillMore {
		}
	})
	o.mu.Lock()
	atEnd := o.eof
	o.mu.Unlock()
	if atEnd {
		// A deadline in the past wakes the pump from its poll; it sets no timer.
		o.file.SetReadDeadline(past)
	}
	wake(o.room)
}

var past = time.Unix(1, 0) // read only

// Attach starts reading at offset from, or after the newest byte with FromEnd. If
// from is no longer kept, the reader begins at the oldest kept byte.
func (o *Output) Attach(from int64) (*Reader, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if from == FromEnd {
		from = o.end
	}
	if from < 0 || from > o.end {
		return nil, fail(ErrInvalid, "attach to output", "", "the offset is negative or beyond the bytes written so far")
	}
	if len(o.readers) >= maxReaders {
		return nil, fail(ErrTooMany, "attach to output", "", "16 readers are attached to this stream")
	}
	r := &Reader{out: o, next: max(from, o.start), ready: make(chan struct{}, 1)}
	r.began, r.lost = r.next, r.next-from
	if r.next < o.end || o.eof {
		wake(r.ready)
	}
	o.readers = append(o.readers, r)
	return r, nil
}

// Reader is one attachment to an Output. It is not for concurrent use, except
// that Close may be called at any time.
type Reader struct {
	out   *Output
	began int64
	lost  int64
	ready chan struct{} // cap 1
	// next is the offset of the next byte to read; protected by out.mu, as is closed.
	next   int64
	closed bool
}

// Began is the offset at which the reader actually began.
func (r *Reader) Began() int64 { return r.began }

// Lost is how many bytes between the requested offset and Began were no longer kept.
func (r *Reader) Lost() int64 { return r.lost }

// Offset is the offset of the next read. A new reader attached there continues this
// one.
func (r *Reader) Offset() int64 {
	r.out.mu.Lock()
	defer r.out.mu.Unlock()
	return r.next
}

// Ready receives after bytes or the end have arrived, and sometimes without either.
// One goroutine can follow several streams: TryRead each until ErrWouldBlock, then
// select on their Ready channels.
func (r *Reader) Ready() <-chan struct{} { return r.ready }

// TryRead reads without blocking. It returns ErrWouldBlock if there are no bytes yet,
// io.EOF at the end of the stream, and ErrClosed after Close.
func (r *Reader) TryRead(p []byte) (int, error) {
	o := r.out
	o.mu.Lock()
	n, err := r.readLocked(p)
	o.mu.Unlock()
	if n > 0 {
		wake(o.room)
	}
	return n, err
}

func (r *Reader) readLocked(p []byte) (int, error) {
	o := r.out
	n := 0
	switch {
	case r.closed:
		return 0, ErrClosed
	case r.next == o.end && o.eof:
		return 0, io.EOF
	case r.next == o.end && len(p) > 0:
		return 0, ErrWouldBlock
	}
	for n < len(p) && r.next < o.end { // at most twice: the ring wraps once
		c := copy(p[n:], o.kept(r.next))
		n += c
		r.next += int64(c)
	}
	o.consumed = max(o.consumed, r.next)
	return n, nil
}

// Read blocks until there are bytes to read, the stream ends (io.EOF), the reader is
// closed (ErrClosed) or stop closes (ErrStopped). A nil stop never closes.
func (r *Reader) Read(stop <-chan struct{}, p []byte) (int, error) {
	for {
		n, err := r.TryRead(p)
		if err != ErrWouldBlock {
			return n, err
		}
		select {
		case <-r.ready:
		case <-stop:
			return 0, ErrStopped
		}
	}
}

// Close detaches. The process goes on. If no other reader is attached, its oldest
// output is displaced again.
func (r *Reader) Close() {
	o := r.out
	o.mu.Lock()
	if !r.closed {
		r.closed = true
		for i, have := range o.readers {
			if have == r {
				last := len(o.readers) - 1
				o.readers[i], o.readers[last] = o.readers[last], nil
				o.readers = o.readers[:last]
				break
			}
		}
		wake(r.ready)
	}
	o.mu.Unlock()
	wake(o.room)
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// sink discards the bytes that background children write to a stream that has ended.
// All streams share its buffer, which is made on first use.
type sink struct {
	mu  sync.Mutex // protects buf
	buf []byte
}

// discard reads once.
func (s *sink) discard(fd int) (n int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.buf != nil {
		return unix.Read(fd, s.buf)
	}
	// There may be no bytes yet, so the first read takes one byte.
	var one [1]byte
	if n, err = unix.Read(fd, one[:]); n == 1 {
		s.buf = make([]byte, 16<<10)
	}
	return n, err
}

// swallow reads until every writer is gone, then closes the file.
func (s *sink) swallow(file *os.File, raw syscall.RawConn) {
	defer file.Close()
	if file.SetReadDeadline(time.Time{}) != nil {
		return
	}
	for {
		n := 0
		var err error
		waitErr := raw.Read(func(fd uintptr) bool {
			n, err = s.discard(int(fd))
			return err != syscall.EAGAIN
		})
		if errors.Is(waitErr, os.ErrDeadlineExceeded) {
			// ended has woken the pump, although it had come here by itself.
			waitErr, n = file.SetReadDeadline(time.Time{}), 1
		}
		if waitErr != nil || (n <= 0 && err != syscall.EINTR) {
			return
		}
	}
}
