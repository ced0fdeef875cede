package microvm

import (
	"os"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/enginetest"
	"agentrun.dev/internal/engine/microvm"
)

// newEngine makes an engine with folders of its own.
func newEngine(t testing.TB) *microvm.Engine {
	t.Helper()
	resident, err := os.MkdirTemp("/dev/shm", "agentrun-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(resident) })
	e, err := microvm.New(microvm.Config{Resident: resident, Scratch: filepath.Join(t.TempDir(), "scratch")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Close() })
	return e
}

func openRoot(t testing.TB) *os.File {
	t.Helper()
	f, err := os.Open(rootImage)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// TestConformance: microVMs keep the contract of engines.
func TestConformance(t *testing.T) {
	forEachSMP(t, func(t *testing.T, vcpus int) {
		enginetest.Run(t, enginetest.Target{
			Engine:        newEngine(t),
			Spec:          engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: vcpus, Scratch: 64 * mib, Hostname: "source"},
			Forks:         count(100, 6),
			ScratchDevice: "/dev/vdb",
		})
	})
}
