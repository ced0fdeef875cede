package disk

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/storage/layer"
)

// shm makes a folder on a real tmpfs.
func shm(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "disk-test-")
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

// store is a folder of layer files.
type store struct {
	t   *testing.T
	dir string
}

func newStore(t *testing.T) store { return store{t, t.TempDir()} }

func (s store) path(r layer.Ref) string { return filepath.Join(s.dir, r.Digest.String()) }

// put writes a layer with the content that fill writes.
func (s store) put(fill func(w *layer.Writer)) layer.Ref {
	s.t.Helper()
	var content bytes.Buffer
	w := layer.NewWriter(&content)
	fill(w)
	if err := os.WriteFile(s.path(w.Ref()), content.Bytes(), 0o600); err != nil {
		s.t.Fatal(err)
	}
	return w.Ref()
}

// pages makes a layer of n pages of nines.
func (s store) pages(n int) layer.Ref {
	s.t.Helper()
	return s.put(func(w *layer.Writer) { _, _ = w.Write(bytes.Repeat([]byte{9}, n*blockSize)) }) // to memory
}

func (s store) open(r layer.Ref) (*os.File, error) { return os.Open(s.path(r)) }

func (s store) openAll(im layer.Image) []*os.File {
	s.t.Helper()
	var files []*os.File
	for _, r := range im.Layers {
		f, err := s.open(r)
		if err != nil {
			s.t.Fatal(err)
		}
		files = append(files, f)
	}
	return files
}

// content reads a whole image.
func (s store) content(im layer.Image) []byte {
	s.t.Helper()
	o, err := layer.OpenImage(im, s.openAll(im))
	if err != nil {
		s.t.Fatal(err)
	}
	p := make([]byte, im.Size)
	if err := o.Read(p, 0); err != nil {
		s.t.Fatal(err)
	}
	if err := o.Close(); err != nil {
		s.t.Fatal(err)
	}
	return p
}

// ref names a layer of so many pages that need not exist.
func ref(n byte, pages uint64) layer.Ref {
	return layer.Ref{Digest: layer.Digest{n}, Size: pages * blockSize}
}

// ext is an extent in pages of an image's first layer.
func ext(start, length uint64) layer.Extent {
	return layer.Extent{Start: start * blockSize, Length: length * blockSize}
}

// sameBytes compares and says where the first difference is.
func sameBytes(t *testing.T, what string, got, want []byte) {
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

// wantError checks that err says all of these.
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
