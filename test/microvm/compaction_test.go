package microvm

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/test/soak"
)

// TestCompaction: in a chain of forks that is longer than the greatest number
// of layers of a stack, each fork has everything that its ancestors wrote, in
// memory and on disk. The same is true if the layers are sealed.
func TestCompaction(t *testing.T) {
	t.Run("plain", func(t *testing.T) { testCompaction(t) })
	t.Run("sealed", func(t *testing.T) { testCompaction(t, snapshot.Sealed(testKey())) })
}

// Each fork of the chain writes data that later layers hardly cover, so that
// its own layer stays: more memory than layer.Gather would store beside a
// layer's pages to have fewer extents, and a block of the disk far from the
// others.
const (
	wroteBytes  = 2 * mib
	wroteBlocks = 128 // from one written block of 4 KiB to the next
)

func testCompaction(t *testing.T, opts ...snapshot.Option) {
	e := newEngine(t)
	sb, err := e.Boot(t.Context(), engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: 1, Scratch: 16 * mib})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	dir := t.TempDir()
	depth := layer.MaxLayers + soak.Count(2*layer.MaxLayers, 2)
	memory, disk := layerWatch{name: "memory"}, layerWatch{name: "disk"}
	d := 0
	// Some layers are covered anyway and dropped, so compaction comes later.
	for ; d < depth || (d < 3*layer.MaxLayers && memory.compacted*disk.compacted == 0); d++ {
		command(t, sb, fmt.Sprintf("yes %d | head -c %d > /wrote-%d; echo disk %d | dd of=/dev/vdb bs=4096 seek=%d conv=fsync,notrunc 2>/dev/null", d, wroteBytes, d, d, d*wroteBlocks))
		child := forkFrom(t, e, sb, filepath.Join(dir, fmt.Sprint(d)), opts...)
		if err := sb.Close(); err != nil {
			t.Fatal(err)
		}
		sb = child
		m, err := snapshot.ReadManifest(filepath.Join(dir, fmt.Sprint(d)))
		if err != nil || m.Private != (len(opts) > 0) {
			t.Fatalf("private: %v, %v", m.Private, err)
		}
		memory.see(t, d, m.Memory.Layers)
		disk.see(t, d, m.Disks[1].Stack.Layers)
		var want strings.Builder
		for before := range d + 1 {
			fmt.Fprintf(&want, "%d\ndisk %d\n", before, before)
		}
		script := fmt.Sprintf("i=0; while [ $i -le %d ]; do head -n1 /wrote-$i; dd if=/dev/vdb bs=4096 skip=$((i*%d)) count=1 2>/dev/null | head -n1; i=$((i+1)); done", d, wroteBlocks)
		if got := command(t, sb, script); got+"\n" != want.String() {
			t.Errorf("at depth %d, what its ancestors wrote reads\n%s", d, got)
		}
	}
	command(t, sb, fmt.Sprintf("i=0; while [ $i -lt %d ]; do yes $i | head -c %d | cmp - /wrote-$i || exit 1; i=$((i+1)); done", d, wroteBytes))
	for _, w := range []layerWatch{memory, disk} {
		if w.compacted == 0 {
			t.Errorf("after %d forks in a chain the %s was never compacted: it has %d layers", d, w.name, len(w.layers))
		}
	}
}

// layerWatch counts how often a stack was compacted.
type layerWatch struct {
	name      string
	layers    []snapshot.Blob
	compacted int
}

// see looks at the stack of the next snapshot. A capture adds at most one layer to
// its parent's; a second new layer comes from a compaction. The number of layers
// proves nothing, because unused layers are dropped.
func (w *layerWatch) see(t *testing.T, depth int, layers []snapshot.Blob) {
	t.Helper()
	if len(layers) > layer.MaxLayers {
		t.Errorf("at depth %d the %s has %d layers, more than %d", depth, w.name, len(layers), layer.MaxLayers)
	}
	added := 0
	for _, l := range layers {
		if !slices.Contains(w.layers, l) {
			added++
		}
	}
	if depth > 0 && added > 1 {
		w.compacted++
	}
	w.layers = layers
}
