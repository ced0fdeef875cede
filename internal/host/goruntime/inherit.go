package goruntime

import (
	"fmt"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// SlowMonitorOfChildren sets the timer slack of the calling thread, to which the caller's
// goroutine must be locked. All processes that the thread starts inherit the slack. A Go
// program among them calls OnlyMonitor. This is for processes whose monitor SlowMonitor
// cannot reach, and it slows their monitor from its first look on.
func SlowMonitorOfChildren(d time.Duration) error {
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(d.Nanoseconds()), 0, 0, 0); err != nil {
		return fmt.Errorf("set timer slack: %w", err)
	}
	return nil
}

// usualSlack is Linux's default.
const usualSlack = 50 * time.Microsecond

// threadsAhead is the minimum number of threads to make ahead. A thread that the
// monitor makes would inherit its slack, but the monitor makes one only if there is no
// idle thread.
const threadsAhead = 2

// OnlyMonitor gives all threads of a process except its monitor the usual timer
// slack. An init function must call it: the runtime runs init functions on the
// first thread, and other goroutines then run on other threads.
//
// This matters because the runtime sleeps for 3 µs before it takes a goroutine
// from another thread's queue. With the monitor's slack that sleep would take
// as long as the slack.
func OnlyMonitor() {
	usual := func() { _ = SlowMonitorOfChildren(usualSlack) } // the kernel accepts any value
	usual()
	// All threads that the runtime has made so far, except the first and the
	// monitor.
	made, _ := runtime.ThreadCreateProfile(nil)
	others := max(made-2, threadsAhead)
	var met, left sync.WaitGroup
	met.Add(others)
	for range others {
		left.Go(func() {
			usual()
			// A goroutine that waits here keeps its thread, so the next one
			// gets another thread.
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			met.Done()
			met.Wait()
		})
	}
	left.Wait()
}
