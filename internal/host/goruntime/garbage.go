package goruntime

import (
	"runtime"
	"runtime/debug"
)

// CollectRarely lets at least headroom bytes of garbage pile up before the
// runtime collects it.
//
// GOGC is off. With GOGC the runtime collects at least every two minutes, which
// wakes every idle process and dirties mark bits and stacks without any
// benefit. A collection also costs a process this small more memory, for
// workers and tables, than it gives back. Without GOGC there is neither a
// periodic collection nor a background scavenger: only the memory limit starts
// a collection. The limit follows the live heap: after each collection it
// becomes twice the live heap plus headroom, so that a busy process does not
// collect all the time.
func CollectRarely(headroom uint64) {
	debug.SetGCPercent(-1)
	// Not measured: asking the runtime costs 170 KiB.
	debug.SetMemoryLimit(int64(runtimeSize + headroom))
	afterEachGC(func() { adjustLimit(headroom) })
}

// runtimeSize is how much memory the runtime of a small program has mapped.
const runtimeSize = 8 << 20

func adjustLimit(headroom uint64) {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	// The limit covers all memory that the runtime has mapped, including stacks
	// and its own tables.
	other := m.Sys - m.HeapSys
	debug.SetMemoryLimit(int64(other + 2*m.HeapAlloc + headroom))
}

// afterEachGC calls f after every collection. It uses an object that is garbage
// at once; its finalizer calls f and makes the next such object.
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
