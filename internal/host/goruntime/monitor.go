package goruntime

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"
)

// The Go runtime's monitor thread (sysmon)
//
// Whenever a thread of an idle Go program enters a system call, the runtime
// wakes its monitor, which then looks around every 20 µs for a millisecond or
// more. On a server that cost is negligible. In a microVM each look programs a
// timer that fires, which costs two exits and two context switches: it made an
// exec in a guest five times as slow. In a vmm process, whose threads enter
// KVM_RUN thousands of times a second, the monitor never sleeps.
//
// The kernel's timer slack of that one thread stretches the 20 µs to the
// duration that the caller allows. The monitor then does its work that much
// later: it takes a P from a thread that is blocked in a system call, preempts
// a goroutine that runs for long, and polls the network if no other thread has.
// A program that blocks in system calls must have enough Ps (GOMAXPROCS) not to
// depend on the monitor.

// SlowMonitor lets the monitor's sleeps take up to d longer. It needs permission
// to set another thread's timer slack (CAP_SYS_NICE), and /proc.
func SlowMonitor(d time.Duration) error {
	tid, err := monitorThread("/proc/self/task", os.Getpid())
	if err != nil {
		return fmt.Errorf("slow down the runtime's monitor: %w", err)
	}
	// Only the folder of a thread group has timerslack_ns. Every thread's id
	// names such a folder, although /proc does not list it.
	f, err := os.OpenFile("/proc/"+strconv.Itoa(tid)+"/timerslack_ns", os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("slow down the runtime's monitor: %w", err)
	}
	_, err = f.WriteString(strconv.FormatInt(d.Nanoseconds(), 10))
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("slow down the runtime's monitor: %w", err)
	}
	return nil
}

// maxPID is PID_MAX_LIMIT: thread ids are below it and wrap around.
const maxPID = 1 << 22

// monitorThread finds the monitor: the runtime starts it before any other
// thread (runtime.main), so its id is the next after the first thread's.
func monitorThread(tasks string, pid int) (int, error) {
	entries, err := os.ReadDir(tasks)
	if err != nil {
		return 0, err
	}
	found, nearest := 0, maxPID
	for _, e := range entries {
		tid, err := strconv.Atoi(e.Name())
		if err != nil || tid == pid {
			continue
		}
		if after := (tid - pid + maxPID) % maxPID; after < nearest {
			found, nearest = tid, after
		}
	}
	if found == 0 {
		return 0, errors.New("the process has one thread only")
	}
	return found, nil
}
