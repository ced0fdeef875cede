package local

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/pack"
	"agentrun.dev/internal/storage/snapshot"
)

func anyHost(snapshot.Manifest) error { return nil }

// freeze puts a snapshot into a store without running a machine.
func freeze(t *testing.T, s *Store, name Name) {
	t.Helper()
	snap, err := snapshot.Make(s.SnapshotFolder(name), func(b *snapshot.Builder) (*snapshot.Snapshot, error) {
		f, err := os.Create(filepath.Join(t.TempDir(), "layer"))
		if err != nil {
			return nil, err
		}
		defer f.Close()
		w := layer.NewWriter(f)
		if _, err := w.Write(bytes.Repeat([]byte{1}, layer.PageSize)); err != nil {
			return nil, err
		}
		if err := b.AddLayer(w.Ref(), f); err != nil {
			return nil, err
		}
		stack := layer.Stack{Size: layer.PageSize, Layers: []layer.Ref{w.Ref()}, Extents: []layer.Extent{{Length: layer.PageSize}}}
		return b.Commit(snapshot.Manifest{
			Created: time.Unix(1e9, 0).UTC(), Kernel: strings.Repeat("ab", 32), CPU: snapshot.CPU{Profile: "p", Vendor: "NobodysChips"},
			TSCKHz: 1, VCPUs: 1, Memory: snapshot.StackOf(stack),
		}, []byte(name))
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := snap.Close(); err != nil {
		t.Fatal(err)
	}
}

func packOf(t *testing.T, s *Store, name Name) []byte {
	t.Helper()
	var out bytes.Buffer
	if _, err := s.Pack(t.Context(), name, &out, pack.PackOptions{}); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// TestUnpack: a snapshot of another store appears under its new name and shares
// the layers that exist already. Unpack removes the leftovers of a killed
// process.
func TestUnpack(t *testing.T) {
	here, there := store(t), store(t)
	freeze(t, here, "one")
	freeze(t, here, "two") // with another state, but the same memory
	snapshots := filepath.Dir(there.SnapshotFolder("x"))
	left := filepath.Join(snapshots, ".tmp-snapshot-left")
	if err := os.Mkdir(left, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, n := range []Name{"one", "two"} {
		b := packOf(t, here, n)
		if err := there.Unpack(t.Context(), bytes.NewReader(b), int64(len(b)), "my-"+n, pack.UnpackOptions{Accept: anyHost}); err != nil {
			t.Fatal(err)
		}
	}
	if exists(left) {
		t.Error("what a killed process left is still there")
	}
	list, err := there.List()
	if err != nil || len(list) != 2 || list[0].Name != "my-one" || list[0].Status != StatusReady {
		t.Fatalf("%+v, %v", list, err)
	}
	var infos []os.FileInfo
	for _, n := range []Name{"my-one", "my-two"} {
		layers, err := filepath.Glob(filepath.Join(there.SnapshotFolder(n), "layers", "*"))
		if err != nil || len(layers) != 1 {
			t.Fatal(layers, err)
		}
		info, err := os.Stat(layers[0])
		if err != nil {
			t.Fatal(err)
		}
		infos = append(infos, info)
	}
	if !os.SameFile(infos[0], infos[1]) {
		t.Error("the layer is there twice")
	}
}

// TestUnpackRefuses: names in use, hosts that do not fit, and files that are not
// snapshots are refused.
func TestUnpackRefuses(t *testing.T) {
	s := store(t)
	freeze(t, s, "one")
	b := packOf(t, s, "one")
	unpack := func(name Name, o pack.UnpackOptions) error {
		return s.Unpack(t.Context(), bytes.NewReader(b), int64(len(b)), name, o)
	}
	if err := unpack("one", pack.UnpackOptions{Accept: anyHost}); err == nil || !strings.Contains(err.Error(), "is there already") {
		t.Errorf("over another one: %v", err)
	}
	// No host has this processor. A host without KVM cannot tell, and refuses,
	// too.
	if err := unpack("two", pack.UnpackOptions{}); err == nil || !strings.Contains(err.Error(), "this host cannot fork it") {
		t.Errorf("of another processor: %v", err)
	}
	if exists(s.SnapshotFolder("two")) {
		t.Error("it was kept")
	}
	var out bytes.Buffer
	if _, err := s.Pack(t.Context(), "nobody", &out, pack.PackOptions{}); !errors.Is(err, ErrNotFound) || out.Len() > 0 {
		t.Errorf("nobody: %v", err)
	}
}
