package main

import (
	"runtime"
	"runtime/debug"
)

// headroom is how much garbage may pile up before it is collected, at least.
const headroom = 4 << 20

// keepSmall sets the runtime up for a process that is idle nearly always and
// is copied with every fork of its VM.
//
// One P: the agent moves bytes, it does not compute, and each P has its own
// caches to dirty.
//
// No GOGC: with it the runtime collects at least every two minutes, which in
// every idle fork wakes the vCPU and dirties mark bits and stacks for nothing.
// Without it there is no periodic collection, and no background scavenger:
// only the memory limit starts one. The limit follows what is live: after each
// collection it is set to twice that plus headroom, so that a sandbox whose
// processes print much does not make the collector run all the time.
func keepSmall() {
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(-1)
	adjustLimit()
	afterEachGC(adjustLimit)
}

func adjustLimit() {
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
