package microvm

import (
	"os"
	"path/filepath"
	"sync"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/enginetest"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/storage/seal"
	"agentrun.dev/test/soak"
)

// newEngine makes an engine with its own folders.
func newEngine(t testing.TB) *microvm.Engine {
	t.Helper()
	return openEngine(t, enginetest.TempDir(t))
}

func openEngine(t testing.TB, dir string) *microvm.Engine {
	t.Helper()
	e, err := engineIn(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Close() })
	return e
}

func engineIn(dir string) (*microvm.Engine, error) {
	return microvm.New(microvm.Config{Resident: filepath.Join(dir, "resident"), Scratch: filepath.Join(dir, "scratch"), Key: testKey()})
}

// testKey is the same key for all engines of the tests.
var testKey = sync.OnceValue(func() *seal.Key {
	k, err := seal.Generate()
	if err != nil {
		panic(err)
	}
	return k
})

// dirEnv names the folder in which a test's engine keeps its files. Parents
// that the tests start and kill use it.
const dirEnv = "AGENTRUN_TEST_DIR"

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
	soakEachSMP(t, func(t *testing.T, vcpus int) {
		dir := enginetest.TempDir(t)
		enginetest.Run(t, enginetest.Target{
			Engine:        openEngine(t, dir),
			Spec:          engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: vcpus, Scratch: 64 * mib, Hostname: "source"},
			Forks:         soak.Count(100, 6),
			ScratchDevice: "/dev/vdb",
			ChildEnv:      []string{dirEnv + "=" + dir},
			Key:           testKey(),
		})
	})
}
