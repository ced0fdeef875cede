package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

// streamPatience is how long a process that writes to a Stream may write nothing. It
// is far longer than any disk or page fault takes.
const streamPatience = 5 * time.Minute

// endPatience is how long Read may wait in all after the process has said that it has
// written everything: the rest is in the pipe, or comes at once.
const endPatience = 10 * time.Second

// ErrUnfinished says that a process keeps a Stream open although it has said that it
// has written everything.
var ErrUnfinished = errors.New("it has not closed a pipe although it says that all is written")

// Stream is a pipe that the process of a sandbox writes to while the sandbox stands
// still. The process is not trusted to finish.
type Stream struct {
	ours, theirs *os.File

	mu       sync.Mutex // protects all following fields
	answered bool
	left     time.Duration // how long Read may still wait
	since    time.Time     // when Read began to wait, or when Answered was called since
}

// NewStream makes a Stream.
func NewStream() (*Stream, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make a pipe: %w", err)
	}
	return &Stream{ours: r, theirs: w, left: streamPatience}, nil
}

// Theirs is the end to give to the process. The caller must hand it over before
// Passed.
func (s *Stream) Theirs() *os.File { return s.theirs }

// Passed closes our copy of the end that was given away. From then on Read ends once
// the process has closed its own.
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

// Answered records that the process has said that it has written everything.
func (s *Stream) Answered() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.answered, s.left, s.since = true, endPatience, now
	_ = s.ours.SetReadDeadline(now.Add(endPatience)) // for a Read under way; a closed pipe ends it anyway
}

// Until closes the reading end when ctx ends. The caller calls stop once the end of
// ctx no longer matters.
func (s *Stream) Until(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, func() { _ = s.ours.Close() }) // Read returns the error
}

// Close closes both ends, so that writers fail. Either may be closed already.
func (s *Stream) Close() {
	_ = s.ours.Close()
	_ = s.theirs.Close()
}
