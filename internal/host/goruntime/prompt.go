package goruntime

import (
	"time"

	"golang.org/x/sys/unix"
)

// shortest is the shortest slice that the kernel takes.
const shortest = 100 * time.Microsecond

// Prompt has the calling thread run soon after it is woken, also where others are
// busy, without a larger share of the processor for it: its slices are short. It is
// for who mostly waits: several that are busy would take turns all the time. The
// caller has locked its goroutine to the thread, for good. Kernels before Linux
// 6.12 have one length for all, and nothing is lost.
func Prompt() {
	// Invariant: the size is that of the struct, as SchedSetAttr wants.
	_ = unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL, Runtime: uint64(shortest)}, 0)
}
