package helper

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// A sentry that restores a checkpoint allocates a dozen megabytes, nearly all of
// which stay: to collect garbage meanwhile costs more than it gives. The runtime
// begins to at seven tenths of 4 MiB times the percentage: at 11 MiB with
// lazyPercent, which is in the midst of a restore, at 22 MiB with restorePercent.
const (
	restorePercent = 800 // until the first collection
	lazyPercent    = 400
	smallHeap      = 16 << 20 // of live objects
)

// LazyGC has garbage collected rarely until the heap is not small any more, and not
// at all in a usual restore.
func LazyGC() {
	debug.SetGCPercent(restorePercent)
	watchHeap(liveHeap)
}

// watchHeap looks at the heap after each collection: an object that nobody has
// is finalized then.
func watchHeap(live func() uint64) {
	runtime.SetFinalizer(new([16]byte), func(*[16]byte) {
		if live() > smallHeap {
			debug.SetGCPercent(100) // Go's own
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
		return smallHeap + 1 // another version of Go: no reason to wait
	}
	return s[0].Value.Uint64()
}
