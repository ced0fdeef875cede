// Package layertest makes layers and compares them, for tests of code that stores and
// reads them.
package layertest

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/storage/layer"
)

// Shm makes a folder on a real tmpfs.
func Shm(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "layer-test-")
	if err != nil {
		t.Fatalf("these tests need a tmpfs at /dev/shm: %v", err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Store is a folder of layer files.
type Store struct {
	*testing.T
	dir string
}

// NewStore makes a Store that is removed at the end of the test.
func NewStore(t *testing.T) Store { return Store{t, t.TempDir()} }

// Path is the path of a layer.
func (s Store) Path(r layer.Ref) string { return filepath.Join(s.dir, r.Digest.String()) }

// Put writes a layer with the content that fill writes.
func (s Store) Put(fill func(w *layer.Writer)) layer.Ref {
	s.Helper()
	f, err := os.CreateTemp(s.dir, "new-")
	if err != nil {
		s.Fatal(err)
	}
	w := layer.NewWriter(f)
	fill(w)
	if err := f.Close(); err != nil {
		s.Fatal(err)
	}
	if err := os.Rename(f.Name(), s.Path(w.Ref())); err != nil {
		s.Fatal(err)
	}
	return w.Ref()
}

// Bytes writes a layer with this content.
func (s Store) Bytes(b []byte) layer.Ref {
	s.Helper()
	return s.Put(func(w *layer.Writer) {
		if _, err := w.Write(b); err != nil {
			s.Fatal(err)
		}
	})
}

// Open opens a layer.
func (s Store) Open(r layer.Ref) (*os.File, error) { return os.Open(s.Path(r)) }

// OpenAll opens the layers of a stack.
func (s Store) OpenAll(stack layer.Stack) []*os.File {
	s.Helper()
	var files []*os.File
	for _, r := range stack.Layers {
		f, err := s.Open(r)
		if err != nil {
			s.Fatal(err)
		}
		files = append(files, f)
	}
	return files
}

// Content reads a whole stack.
func (s Store) Content(stack layer.Stack) []byte {
	s.Helper()
	o, err := layer.OpenStack(stack, s.OpenAll(stack))
	if err != nil {
		s.Fatal(err)
	}
	p := make([]byte, stack.Size)
	if err := o.Read(p, 0); err != nil {
		s.Fatal(err)
	}
	if err := o.Close(); err != nil {
		s.Fatal(err)
	}
	return p
}

// Ref names a layer of that many pages, which need not exist.
func Ref(n byte, pages uint64) layer.Ref {
	return layer.Ref{Digest: layer.Digest{n}, Size: pages * layer.PageSize}
}

// SameBytes compares two slices and reports the first difference.
func SameBytes(t *testing.T, what string, got, want []byte) {
	t.Helper()
	if bytes.Equal(got, want) {
		return
	}
	if len(got) != len(want) {
		t.Fatalf("%s: %d bytes, want %d", what, len(got), len(want))
	}
	for i := range got {
		if got[i] != want[i] {
			t.Fatalf("%s: byte %#x is %d, want %d", what, i, got[i], want[i])
		}
	}
}

// WantError checks that the text of err contains all of these words.
func WantError(t *testing.T, err error, words ...string) {
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
