package agent

import (
	"io"
	"sync"

	"agentrun.dev/internal/guest/guestrpc"
)

const (
	// maxEventLog bounds the events that are kept of one execution.
	maxEventLog = 8 << 20
	// eventOverhead is the cost of an event beside its data.
	eventOverhead = 128
)

// eventLog keeps the events of an execution, as Output keeps bytes. While a reader is
// attached nothing is lost, and the interpreter waits. Otherwise new events displace
// the oldest.
type eventLog struct {
	room chan struct{} // cap 1: a reader has made room

	mu       sync.Mutex // protects all following fields
	kept     []guestrpc.CodeEvent
	first    uint64 // sequence number of kept[0]
	size     int    // of the kept events
	consumed uint64 // one more than the highest number that any reader has read
	dropped  uint64 // events displaced before any reader read them
	ended    bool
	readers  []*eventReader
}

func newEventLog() *eventLog { return &eventLog{room: make(chan struct{}, 1)} }

func eventSize(e *guestrpc.CodeEvent) int { return len(e.Data) + eventOverhead }

// add appends an event and gives it its number. It waits for slow readers until stop
// closes. Then it displaces events that they have not read.
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
		return true // its interpreter is dead, and its end was announced
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

// slowestLocked is the number that the slowest reader reads next. Without a reader it
// is the number of the next event.
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

// total counts all events, and those that were lost unread.
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

// attach starts reading at number from, or after the newest event with FromEnd.
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

// read waits for the next event. io.EOF says that no more events will come.
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
	r.next = max(r.next, l.first) // the oldest events were displaced after the interpreter's end
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
