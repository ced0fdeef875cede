package goruntime

import (
	"time"

	"golang.org/x/sys/unix"
)

// shortest is the shortest slice that the kernel accepts.
const shortest = 100 * time.Microsecond

// Prompt gives the calling thread short time slices. So it runs soon after it
// wakes, even if other threads are busy, without a larger share of the processor.
// It suits a thread that mostly waits: several busy threads with short slices would
// switch all the time. The caller has locked its goroutine to the thread, for good.
// Kernels before Linux 6.12 have one slice length for all threads; there Prompt has
// no effect.
func Prompt() {
	// Invariant: the size is that of the struct, as SchedSetAttr requires.
	_ = unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL, Runtime: uint64(shortest)}, 0)
}
