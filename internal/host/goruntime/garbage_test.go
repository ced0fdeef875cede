package goruntime

import (
	"runtime"
	"runtime/debug"
	"testing"
)

// TestCollectRarely: the memory limit alone keeps starting collections.
func TestCollectRarely(t *testing.T) {
	old := debug.SetGCPercent(100)
	limit := debug.SetMemoryLimit(-1)
	t.Cleanup(func() { debug.SetMemoryLimit(limit); debug.SetGCPercent(old) })
	const headroom = 8 << 20
	CollectRarely(headroom)
	if got := debug.SetGCPercent(-1); got != -1 {
		t.Errorf("GOGC is %d", got)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var keep []byte
	for range 64 {
		for range 1024 {
			keep = make([]byte, 4<<10)
		}
	}
	runtime.KeepAlive(keep)
	runtime.ReadMemStats(&after)
	if n := after.NumGC - before.NumGC; n < 3 {
		t.Errorf("256 MiB of garbage led to %d collections", n)
	}
	// The limit has followed the live heap and still applies.
	if limit := debug.SetMemoryLimit(-1); limit > 1<<30 {
		t.Errorf("the limit is %d MiB", limit>>20)
	}
}
