package main

import (
	"runtime"

	"agentrun.dev/internal/host/goruntime"
)

// headroom is the minimum amount of garbage before a collection.
const headroom = 4 << 20

// keepSmall sets one P, because the agent moves bytes and does not compute, and each
// P has caches of its own to dirty in every fork.
func keepSmall() {
	runtime.GOMAXPROCS(1)
	goruntime.CollectRarely(headroom)
}
