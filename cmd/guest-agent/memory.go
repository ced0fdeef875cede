package main

import (
	"runtime"

	"agentrun.dev/internal/host/goruntime"
)

// headroom is how much garbage may pile up before it is collected, at least.
const headroom = 4 << 20

// keepSmall: one P, as the agent moves bytes and does not compute, and each P
// has its own caches to dirty in every fork.
func keepSmall() {
	runtime.GOMAXPROCS(1)
	goruntime.CollectRarely(headroom)
}
