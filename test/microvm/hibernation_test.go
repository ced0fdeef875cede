package microvm

import (
	"path/filepath"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/enginetest"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/storage/seal"
)

// TestHibernation: hibernation makes no copy of the sandbox in memory. The
// sandbox has its own disk.
func TestHibernation(t *testing.T) {
	enginetest.Hibernation(t, func(t *testing.T, resident string, key *seal.Key) engine.Engine {
		e, err := microvm.New(microvm.Config{Resident: resident, Scratch: filepath.Join(enginetest.TempDir(t), "scratch"), Key: key})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = e.Close() })
		return e
	}, engine.Spec{Root: openRoot(t), Memory: 320 * mib, VCPUs: 1, Scratch: 16 * mib})
}
