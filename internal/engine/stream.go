package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
)

// streamPatience is for how long a process that writes to a Stream may write
// nothing. It is far longer than any disk or page fault takes.
const streamPatience = 5 * time.Minute

// Stream is a pipe that the process of a sandbox writes to while the sandbox
// stands still. The process is not trusted to come to an end.
type Stream struct{ ours, theirs *os.File }

// NewStream makes one.
func NewStream() (*Stream, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make a pipe: %w", err)
	}
	return &Stream{r, w}, nil
}

// Theirs is the end that is given away. The process must get it before Passed.
func (s *Stream) Theirs() *os.File { return s.theirs }

// Passed closes the end that was given away: from then on Read ends when the
// process has closed its own.
func (s *Stream) Passed() error { return s.theirs.Close() }

// Read fails if nothing comes for too long.
func (s *Stream) Read(p []byte) (int, error) {
	if err := s.ours.SetReadDeadline(time.Now().Add(streamPatience)); err != nil {
		return 0, err
	}
	n, err := s.ours.Read(p)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("the sandbox's process has written nothing for %v", streamPatience)
	}
	return n, err
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
