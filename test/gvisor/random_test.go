package gvisor

import (
	"testing"

	"agentrun.dev/internal/engine/enginetest"
)

// TestRandom: forks share no random numbers.
func TestRandom(t *testing.T) {
	for _, vcpus := range []int{1, 2} {
		t.Run(itoa(vcpus)+" vCPUs", func(t *testing.T) {
			s := spec(t)
			s.VCPUs = vcpus
			enginetest.Random(t, newEngine(t, config(enginetest.TempDir(t))), s)
		})
	}
}
