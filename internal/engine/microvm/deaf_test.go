package microvm

import (
	"context"
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestReadsNothing: one that reads nothing is not waited for by whoever dials its
// guest, however many have done so before.
func TestReadsNothing(t *testing.T) {
	s := startHostile(t, "nothing")
	s.patience.Store(int64(100 * time.Millisecond))
	if err := unix.Kill(s.Pid(), unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	for { // the socket is full at some time
		if _, err := s.Dial(ctx, 5); err == nil {
			t.Fatal("it has answered")
		} else if !errors.Is(err, context.DeadlineExceeded) {
			break
		}
	}
	killedFor(t, s, "it has not answered Connect within")
}
