package microvm

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/layer"
	"agentrun.dev/internal/snapshot"
)

// TestCompaction: a chain of forks longer than an image may have layers keeps
// all that its ancestors wrote, in memory and on disk; so does one whose images
// are sealed.
func TestCompaction(t *testing.T) {
	t.Run("plain", func(t *testing.T) { testCompaction(t) })
	t.Run("sealed", func(t *testing.T) { testCompaction(t, snapshot.Sealed(testKey())) })
}

func testCompaction(t *testing.T, opts ...snapshot.Option) {
	e := newEngine(t)
	sb, err := e.Boot(t.Context(), engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: 1, Scratch: 16 * mib})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	dir := t.TempDir()
	depth := layer.MaxLayers + count(2*layer.MaxLayers, 2)
	memory, disk := layerWatch{name: "memory"}, layerWatch{name: "disk"}
	for d := range depth {
		command(t, sb, fmt.Sprintf("echo %d > /wrote-%d; echo disk %d | dd of=/dev/vdb bs=4096 seek=%d conv=fsync,notrunc 2>/dev/null", d, d, d, d))
		child := forkFrom(t, e, sb, filepath.Join(dir, fmt.Sprint(d)), opts...)
		if err := sb.Close(); err != nil {
			t.Fatal(err)
		}
		sb = child
		m, err := snapshot.ReadManifest(filepath.Join(dir, fmt.Sprint(d)))
		if err != nil || m.Private != (len(opts) > 0) {
			t.Fatalf("private: %v, %v", m.Private, err)
		}
		memory.see(t, d, len(m.Memory.Layers))
		disk.see(t, d, len(m.Disks[1].Image.Layers))
		var want strings.Builder
		for before := range d + 1 {
			fmt.Fprintf(&want, "%d\ndisk %d\n", before, before)
		}
		script := fmt.Sprintf("i=0; while [ $i -le %d ]; do cat /wrote-$i; dd if=/dev/vdb bs=4096 skip=$i count=1 2>/dev/null | head -n1; i=$((i+1)); done", d)
		if got := command(t, sb, script); got+"\n" != want.String() {
			t.Errorf("at depth %d, what its ancestors wrote reads\n%s", d, got)
		}
	}
	for _, w := range []layerWatch{memory, disk} {
		if w.compacted == 0 {
			t.Errorf("after %d forks in a chain the %s was never compacted: it has %d layers", depth, w.name, w.layers)
		}
	}
}

// layerWatch counts how often an image lost layers.
type layerWatch struct {
	name              string
	layers, compacted int
}

func (w *layerWatch) see(t *testing.T, depth, layers int) {
	t.Helper()
	if layers > layer.MaxLayers {
		t.Errorf("at depth %d the %s has %d layers, more than %d", depth, w.name, layers, layer.MaxLayers)
	}
	if layers < w.layers {
		w.compacted++
	}
	w.layers = layers
}
