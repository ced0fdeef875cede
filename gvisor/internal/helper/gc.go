package helper

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// A sentry that restores a checkpoint allocates a few megabytes, and would
// collect garbage several times meanwhile: while its heap is small, that costs
// more than it gives.
const (
	lazyPercent = 400
	smallHeap   = 16 << 20 // of live objects
)

// LazyGC has garbage collected rarely until the heap is not small any more.
func LazyGC() {
	debug.SetGCPercent(lazyPercent)
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
