package goruntime

import (
	"fmt"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// SlowMonitorOfChildren gives the calling thread, to which the caller's goroutine must be
// locked, a timer slack with which all processes that it starts begin. One that
// is a Go program calls OnlyMonitor. It is for processes that cannot be reached
// by SlowMonitor, and slows their monitor down from its first look on.
func SlowMonitorOfChildren(d time.Duration) error {
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(d.Nanoseconds()), 0, 0, 0); err != nil {
		return fmt.Errorf("set timer slack: %w", err)
	}
	return nil
}

// usualSlack is what Linux gives to processes.
const usualSlack = 50 * time.Microsecond

// threadsAhead is how many threads are made ahead, at least. A thread that the monitor
// makes begins with its slack; but it takes one that is idle where there is one.
const threadsAhead = 2

// OnlyMonitor gives all threads of a process but its monitor the usual timer
// slack. It must be called by an init function, which the runtime has the first
// thread run: other goroutines then run on others.
//
// The runtime sleeps for 3 µs before it takes a goroutine from another thread's
// queue. With the monitor's slack that would be as long as the slack.
func OnlyMonitor() {
	usual := func() { _ = SlowMonitorOfChildren(usualSlack) } // the kernel takes any value
	usual()
	// All that the runtime has made so far but the first and the monitor.
	made, _ := runtime.ThreadCreateProfile(nil)
	others := max(made-2, threadsAhead)
	var met, left sync.WaitGroup
	met.Add(others)
	for range others {
		left.Go(func() {
			usual()
			// Whoever waits here keeps its thread: the next one gets another.
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			met.Done()
			met.Wait()
		})
	}
	left.Wait()
}
