package microvm

import (
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/enginetest"
)

// TestRandom: forks share no random numbers.
func TestRandom(t *testing.T) {
	forEachSMP(t, func(t *testing.T, vcpus int) {
		enginetest.Random(t, newEngine(t), engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: vcpus, Scratch: 64 * mib})
	})
}
