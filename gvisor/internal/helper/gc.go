package helper

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// A sentry that restores a checkpoint allocates a dozen megabytes, and nearly all of
// them stay. Collecting garbage meanwhile costs more than it frees. The runtime
// begins to collect at seven tenths of 4 MiB times the percentage: at 11 MiB with
// lazyPercent, which is in the middle of a restore, and at 22 MiB with
// restorePercent.
const (
	restorePercent = 800 // until the first collection
	lazyPercent    = 400
	smallHeap      = 16 << 20 // of live objects
)

// LazyGC makes garbage collections rare while the heap is small. A usual restore ends
// before the first collection.
func LazyGC() {
	debug.SetGCPercent(restorePercent)
	watchHeap(liveHeap)
}

// watchHeap checks the heap after each collection. An unreachable object is finalized
// then.
func watchHeap(live func() uint64) {
	runtime.SetFinalizer(new([16]byte), func(*[16]byte) {
		if live() > smallHeap {
			debug.SetGCPercent(100) // Go's default
			return
		}
		debug.SetGCPercent(lazyPercent)
		watchHeap(live)
	})
}

func liveHeap() uint64 {
	s := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(s)
	if s[0].Value.Kind() != metrics.KindUint64 {
		return smallHeap + 1 // another version of Go: do not wait
	}
	return s[0].Value.Uint64()
}
