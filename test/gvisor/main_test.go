// Package gvisor tests real sandboxes on gVisor, which runs on any machine,
// through the code that agentrun uses.
package gvisor

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/enginetest"
	"agentrun.dev/internal/engine/gvisor"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/seal"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/test/soak"
)

const mib = 1 << 20

// rootImage is an EROFS image of a busybox root, made once.
var rootImage string

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

// dirEnv names the folder in which a test's engine keeps its files. Parents
// that the tests start and kill use it.
const dirEnv = "AGENTRUN_TEST_DIR"

func runTests(m *testing.M) int {
	enginetest.Orphan(func() (engine.Engine, error) { return gvisor.New(config(os.Getenv(dirEnv))) })
	makeAhead()
	dir, err := os.MkdirTemp("", "agentrun-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if rootImage, err = enginetest.MakeRoot(dir); err != nil {
		fmt.Fprintln(os.Stderr, "make a root filesystem for the tests:", err)
		return 1
	}
	return m.Run()
}

func config(dir string) gvisor.Config {
	return gvisor.Config{Resident: filepath.Join(dir, "resident"), RunDir: filepath.Join(dir, "run")}
}

// newEngine makes an engine.
func newEngine(t testing.TB, cfg gvisor.Config) *gvisor.Engine {
	t.Helper()
	e, err := gvisor.New(cfg)
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

func spec(t testing.TB) engine.Spec {
	return engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: 2, Scratch: 64 * mib, Hostname: "source"}
}

// atOnceParts are the parts of the suite that take seconds and do not depend on
// whether a fork's sandbox was made ahead. Some measure a running sandbox, fill
// it up or send through its wire. Others fork the snapshot of a hibernated
// sandbox, for which no sandbox was made ahead. The parts Identity, Clock, Disk
// and Network cover the effects of making a sandbox ahead.
var atOnceParts = []string{"Pause", "Limits", "Wire", "Hibernate", "Wake", "TimesOut"}

// TestConformance: sandboxes on gVisor keep the contract of engines, with and
// without sandboxes made ahead.
func TestConformance(t *testing.T) {
	t.Run("made at once", func(t *testing.T) { testConformance(t, 0, nil) })
	t.Run("made ahead", func(t *testing.T) {
		if soak.On() {
			testConformance(t, 2, nil)
		} else {
			testConformance(t, 2, atOnceParts)
		}
	})
}

func testConformance(t *testing.T, ahead int, skip []string) {
	dir := enginetest.TempDir(t)
	cfg := config(dir)
	cfg.Precreate = ahead
	key, err := seal.Generate()
	if err != nil {
		t.Fatal(err)
	}
	cfg.Key = key
	enginetest.Run(t, enginetest.Target{
		Engine: newEngine(t, cfg), Spec: spec(t), Forks: soak.Count(50, 6), ChildEnv: []string{dirEnv + "=" + dir}, Key: key, Skip: skip,
	})
}

func itoa(n int) string { return strconv.Itoa(n) }

// layerOf returns the layer with a snapshot's pages.
func layerOf(snap *snapshot.Snapshot) layer.Ref { return layer.Ref(snap.Manifest().GVisor.Pages) }
