package agent

import (
	"io"
	"sync"

	"agentrun.dev/internal/guest/guestrpc"
)

const (
	// maxEventLog bounds the events that are kept of one execution.
	maxEventLog = 8 << 20
	// eventOverhead is what an event costs beside its data.
	eventOverhead = 128
)

// eventLog is what an execution tells beside its output: to events what Output
// is to bytes. While a reader is attached nothing is lost and the interpreter waits;
// otherwise the oldest events make room.
type eventLog struct {
	room chan struct{} // cap 1: a reader made room

	mu       sync.Mutex // protects all following fields
	kept     []guestrpc.CodeEvent
	first    uint64 // sequence number of kept[0]
	size     int    // of those kept
	consumed uint64 // one more than the highest number that any reader has read
	dropped  uint64 // gone before anybody read them
	ended    bool
	readers  []*eventReader
}

func newEventLog() *eventLog { return &eventLog{room: make(chan struct{}, 1)} }

func eventSize(e *guestrpc.CodeEvent) int { return len(e.Data) + eventOverhead }

// add appends an event and gives it its number. It waits for readers until stop
// closes, and makes room at their expense then.
func (l *eventLog) add(stop <-chan struct{}, e guestrpc.CodeEvent) {
	patient := true
	for !l.tryAdd(e, patient) {
		select {
		case <-l.room:
		case <-stop:
			patient = false
		}
	}
}

func (l *eventLog) tryAdd(e guestrpc.CodeEvent, patient bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return true // its interpreter is dead, and it has been told to be over
	}
	for l.size+eventSize(&e) > maxEventLog && len(l.kept) > 0 {
		if patient && l.slowestLocked() <= l.first {
			return false
		}
		if l.consumed <= l.first {
			l.dropped++
		}
		l.size -= eventSize(&l.kept[0])
		l.kept[0] = guestrpc.CodeEvent{}
		l.kept = l.kept[1:]
		l.first++
	}
	e.Seq = l.first + uint64(len(l.kept))
	l.kept = append(l.kept, e)
	l.size += eventSize(&e)
	l.wakeLocked()
	return true
}

// slowestLocked is the number that the slowest reader reads next; behind all if
// nobody is attached.
func (l *eventLog) slowestLocked() uint64 {
	slowest := l.first + uint64(len(l.kept))
	for _, r := range l.readers {
		slowest = min(slowest, r.next)
	}
	return slowest
}

func (l *eventLog) wakeLocked() {
	for _, r := range l.readers {
		wake(r.ready)
	}
}

func (l *eventLog) end() {
	l.mu.Lock()
	l.ended = true
	l.wakeLocked()
	l.mu.Unlock()
	wake(l.room)
}

// total counts the events, and those of them that nobody has read.
func (l *eventLog) total() guestrpc.OutputTotal {
	l.mu.Lock()
	defer l.mu.Unlock()
	return guestrpc.OutputTotal{Bytes: int64(l.first) + int64(len(l.kept)), Dropped: int64(l.dropped)}
}

func (l *eventLog) bytes() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.size
}

// attach starts reading at number from, or behind the newest with FromEnd.
func (l *eventLog) attach(from int64) (*eventReader, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	end := l.first + uint64(len(l.kept))
	if from == FromEnd {
		from = int64(end)
	}
	if from < 0 || uint64(from) > end {
		return nil, fail(ErrInvalid, "attach to events", "", "the number is negative or beyond the last event")
	}
	if len(l.readers) >= maxReaders {
		return nil, fail(ErrTooMany, "attach to events", "", "16 readers are attached to this execution")
	}
	r := &eventReader{log: l, next: max(uint64(from), l.first), ready: make(chan struct{}, 1)}
	r.start = guestrpc.OutputStart{Offset: int64(r.next), Dropped: int64(r.next) - from}
	wake(r.ready)
	l.readers = append(l.readers, r)
	return r, nil
}

// eventReader is one attachment to an eventLog.
type eventReader struct {
	log   *eventLog
	start guestrpc.OutputStart
	ready chan struct{} // cap 1
	next  uint64        // protected by log.mu
}

// read waits for the next event; io.EOF says that there is none.
func (r *eventReader) read(stop <-chan struct{}) (guestrpc.CodeEvent, error) {
	for {
		e, err := r.try()
		if err != ErrWouldBlock {
			return e, err
		}
		select {
		case <-r.ready:
		case <-stop:
			return guestrpc.CodeEvent{}, ErrStopped
		}
	}
}

func (r *eventReader) try() (guestrpc.CodeEvent, error) {
	l := r.log
	l.mu.Lock()
	defer l.mu.Unlock()
	r.next = max(r.next, l.first) // the oldest made room after the interpreter's end
	if at := r.next - l.first; at < uint64(len(l.kept)) {
		r.next++
		l.consumed = max(l.consumed, r.next)
		wake(l.room)
		return l.kept[at], nil
	}
	if l.ended {
		return guestrpc.CodeEvent{}, io.EOF
	}
	return guestrpc.CodeEvent{}, ErrWouldBlock
}

func (r *eventReader) close() {
	l := r.log
	l.mu.Lock()
	for i, have := range l.readers {
		if have == r {
			l.readers = append(l.readers[:i], l.readers[i+1:]...)
			break
		}
	}
	l.mu.Unlock()
	wake(l.room)
}
