package goruntime

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// TestPrompt: the thread gets short slices and is otherwise unchanged; other
// threads do not change.
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
		runtime.LockOSThread() // the thread ends with the goroutine
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
