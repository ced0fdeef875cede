package goruntime

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// TestPrompt: the thread has short slices and is else as before; other threads
// have what they had.
func TestPrompt(t *testing.T) {
	attr := func(tid int) *unix.SchedAttr {
		t.Helper()
		a, err := unix.SchedGetAttr(tid, 0)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and ends with it
		before := *attr(0)
		t.Logf("slices of %d ns before", before.Runtime)
		Prompt()
		after := *attr(0)
		if before.Runtime != 0 { // the kernel has slices of different lengths
			before.Runtime = uint64(shortest)
		}
		if after != before {
			t.Errorf("%+v, want %+v", after, before)
		}
	}()
	<-done
	if a := attr(0); a.Runtime == uint64(shortest) {
		t.Errorf("another thread has %+v", a)
	}
}
