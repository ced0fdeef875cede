package goruntime

import (
	"runtime"
	"runtime/debug"
)

// CollectRarely lets garbage pile up to headroom bytes, at least, before it is
// collected.
//
// There is no GOGC: with it the runtime collects at least every two minutes,
// which in every idle process wakes it and dirties mark bits and stacks for
// nothing; and one collection costs a process this small more memory, for
// workers and tables, than it gives back. Without it there is no periodic
// collection, and no background scavenger: only the memory limit starts one.
// The limit follows what is live: after each collection it is set to twice that
// plus headroom, so that a process with much to do does not collect all the
// time.
func CollectRarely(headroom uint64) {
	debug.SetGCPercent(-1)
	// Not measured: to ask the runtime costs 170 KiB.
	debug.SetMemoryLimit(int64(runtimeSize + headroom))
	afterEachGC(func() { adjustLimit(headroom) })
}

// runtimeSize is what the runtime of a small program has mapped.
const runtimeSize = 8 << 20

func adjustLimit(headroom uint64) {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	// The limit counts all that the runtime has mapped: stacks and its own
	// tables too.
	other := m.Sys - m.HeapSys
	debug.SetMemoryLimit(int64(other + 2*m.HeapAlloc + headroom))
}

// afterEachGC calls f after every collection, by way of an object that is
// garbage at once and whose finalizer makes the next one.
func afterEachGC(f func()) {
	type token struct{ _ [16]byte }
	var arm func()
	arm = func() {
		runtime.SetFinalizer(&token{}, func(*token) {
			f()
			arm()
		})
	}
	arm()
}
