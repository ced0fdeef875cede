package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

// streamPatience is for how long a process that writes to a Stream may write
// nothing. It is far longer than any disk or page fault takes.
const streamPatience = 5 * time.Minute

// endPatience is for how long, in all, a Stream may be waited for whose process has
// said that it has written everything: the rest is in the pipe, or comes at once.
const endPatience = 10 * time.Second

// ErrUnfinished says that a process keeps a Stream open that it has said to have
// written.
var ErrUnfinished = errors.New("it has not closed a pipe although it says that all is written")

// Stream is a pipe that the process of a sandbox writes to while the sandbox
// stands still. The process is not trusted to come to an end.
type Stream struct {
	ours, theirs *os.File

	mu       sync.Mutex // protects all following fields
	answered bool
	left     time.Duration // for how long Read may still wait
	since    time.Time     // it has begun to wait, or was answered meanwhile
}

// NewStream makes one.
func NewStream() (*Stream, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make a pipe: %w", err)
	}
	return &Stream{ours: r, theirs: w, left: streamPatience}, nil
}

// Theirs is the end that is given away. The process must get it before Passed.
func (s *Stream) Theirs() *os.File { return s.theirs }

// Passed closes the end that was given away: from then on Read ends when the
// process has closed its own.
func (s *Stream) Passed() error { return s.theirs.Close() }

// Read fails if nothing comes for too long.
func (s *Stream) Read(p []byte) (int, error) {
	if err := s.wait(time.Now()); err != nil {
		return 0, err
	}
	n, err := s.ours.Read(p)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.answered {
		s.left -= time.Since(s.since)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		if err = fmt.Errorf("the sandbox's process has written nothing for %v", streamPatience); s.answered {
			err = ErrUnfinished
		}
	}
	return n, err
}

// wait notes that Read begins, and sets how long it may take.
func (s *Stream) wait(now time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.since = now
	return s.ours.SetReadDeadline(now.Add(s.left))
}

// Answered says that the process has said that it has written everything.
func (s *Stream) Answered() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.answered, s.left, s.since = true, endPatience, now
	_ = s.ours.SetReadDeadline(now.Add(endPatience)) // for a Read under way; a closed one ends anyhow
}

// Until closes the reading end when the context ends. stop is called before that
// does not matter any more.
func (s *Stream) Until(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, func() { _ = s.ours.Close() }) // Read says so
}

// Close closes both ends: whoever writes fails. Either may be closed already.
func (s *Stream) Close() {
	_ = s.ours.Close()
	_ = s.theirs.Close()
}
