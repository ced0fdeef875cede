package snapshot

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/storage/layer"
)

const page = layer.PageSize

// layerFile writes a layer of pages filled with b.
func layerFile(t testing.TB, b byte, pages int) (layer.Ref, *os.File) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "layer"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() }) // some are closed earlier
	w := layer.NewWriter(f)
	if _, err := w.Write(bytes.Repeat([]byte{b}, pages*page)); err != nil {
		t.Fatal(err)
	}
	return w.Ref(), f
}

// stack has one extent, with the whole layer.
func stack(r layer.Ref) Stack {
	return StackOf(layer.Stack{Size: 2 * r.Size, Layers: []layer.Ref{r}, Extents: []layer.Extent{{Start: r.Size, Length: r.Size}}})
}

var state = []byte("processors and devices")

// manifest describes a machine with these layers as memory and disk.
func manifest(memory, disk layer.Ref) Manifest {
	return Manifest{
		Created:  time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC),
		Kernel:   strings.Repeat("ab", 32),
		CPU:      CPU{Profile: "host-v1", Vendor: "AuthenticAMD", Family: 23, Model: 1, Stepping: 2, Features: map[string]uint32{"1.0.ecx": 1 << 31, "7.0.ebx": 5}},
		TSCKHz:   2_400_000,
		VCPUs:    2,
		Memory:   stack(memory),
		Disks:    []Disk{{ID: "root", ReadOnly: true, Stack: stack(disk)}, {ID: "my data", Stack: Stack{Size: page}}},
		Nets:     []Net{{MAC: "02:00:00:00:00:01", MTU: 1500, Address: "10.0.2.15/24", Gateway: "10.0.2.2", DNS: []string{"10.0.2.3"}}},
		Hostname: "box-1",
		Labels:   map[string]string{"team/name": "<ümläut> & co", "b": ""},
	}
}

// full is a manifest with every field set, as in a file.
func full() Manifest {
	m := manifest(layer.Ref{Digest: layer.Digest{1}, Size: 3 * page}, layer.Ref{Digest: layer.Digest{2}, Size: page})
	m.Format, m.Engine = Format, Engine
	m.Parent = strings.Repeat("cd", 32)
	m.State = Blob{layer.Digest{3}, 99}
	return m
}

// build makes a snapshot with two layers at dir.
func build(t *testing.T, dir string) *Snapshot {
	t.Helper()
	b, err := NewBuilder(dir)
	if err != nil {
		t.Fatal(err)
	}
	memory, mf := layerFile(t, 1, 100)
	disk, df := layerFile(t, 2, 3)
	for _, err := range []error{b.AddLayer(memory, mf), b.AddLayer(disk, df), b.AddLayer(disk, df)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	s, err := b.Commit(manifest(memory, disk), state)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() }) // some are closed earlier
	if err := b.Abort(); err != nil {
		t.Errorf("Abort after Commit: %v", err)
	}
	return s
}

// opened opens a snapshot and verifies it.
func opened(t *testing.T, dir string) *Snapshot {
	t.Helper()
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() }) // some are closed earlier
	if err := s.Verify(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

// names lists the names in a folder.
func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

// rewrite replaces the content of a read-only file.
func rewrite(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, content, 0o400); err != nil {
		t.Fatal(err)
	}
}

func wantError(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one with %q", words)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
}
