package layer

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// shm makes a folder on a real tmpfs.
func shm(t *testing.T) string {
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

// store is a folder of layer files.
type store struct {
	t   *testing.T
	dir string
}

func newStore(t *testing.T) store { return store{t, t.TempDir()} }

func (s store) path(r Ref) string { return filepath.Join(s.dir, r.Digest.String()) }

// put writes a layer with the content that fill writes.
func (s store) put(fill func(w *Writer)) Ref {
	s.t.Helper()
	f, err := os.CreateTemp(s.dir, "new-")
	if err != nil {
		s.t.Fatal(err)
	}
	w := NewWriter(f)
	fill(w)
	if err := f.Close(); err != nil {
		s.t.Fatal(err)
	}
	if err := os.Rename(f.Name(), s.path(w.Ref())); err != nil {
		s.t.Fatal(err)
	}
	return w.Ref()
}

func (s store) bytes(b []byte) Ref {
	s.t.Helper()
	return s.put(func(w *Writer) {
		if _, err := w.Write(b); err != nil {
			s.t.Fatal(err)
		}
	})
}

func (s store) open(r Ref) (*os.File, error) { return os.Open(s.path(r)) }

func (s store) openAll(im Image) []*os.File {
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
func (s store) content(im Image) []byte {
	s.t.Helper()
	b, err := OpenImage(im, s.openAll(im))
	if err != nil {
		s.t.Fatal(err)
	}
	p := make([]byte, im.Size)
	if err := b.Read(p, 0); err != nil {
		s.t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		s.t.Fatal(err)
	}
	return p
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

// page is full of a byte that is not zero.
func page(r *rand.Rand) []byte {
	return bytes.Repeat([]byte{byte(1 + r.IntN(255))}, PageSize)
}
