package tree

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

// entry is an entry of a test archive: its content and the way to write it.
type entry struct {
	tar.Header
	content string
}

var stamp = time.Date(2020, 2, 3, 4, 5, 6, 0, time.UTC)

func file(name, content string) entry {
	return entry{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content)), ModTime: stamp}, content}
}

func dir(name string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755, ModTime: stamp}}
}

func symlink(name, target string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777, ModTime: stamp}}
}

func hardlink(name, target string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target, ModTime: stamp}}
}

func (e entry) with(change func(*tar.Header)) entry {
	change(&e.Header)
	return e
}

func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		if err := w.WriteHeader(&e.Header); err != nil {
			t.Fatalf("entry %q: %v", e.Name, err)
		}
		if _, err := w.Write([]byte(e.content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func gzipped(t testing.TB, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, err := w.Write(b)
	if err = errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func zstded(t testing.TB, b []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	return w.EncodeAll(b, nil)
}

// unpack applies layers and returns the folder.
func unpack(t testing.TB, limits Limits, layers ...[]byte) (string, Facts, error) {
	t.Helper()
	root := filepath.Join(t.TempDir(), "root")
	if err := os.Mkdir(root, 0o755); err != nil {
		t.Fatal(err)
	}
	tr, err := New(root, limits)
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	for _, l := range layers {
		if _, err := tr.Apply(t.Context(), bytes.NewReader(l)); err != nil {
			return root, Facts{}, err
		}
	}
	facts, err := tr.Finish()
	return root, facts, err
}

func mustUnpack(t testing.TB, layers ...[]byte) (string, Facts) {
	t.Helper()
	root, facts, err := unpack(t, DefaultLimits(), layers...)
	if err != nil {
		t.Fatal(err)
	}
	return root, facts
}

// listing describes a tree, a line for each path: its type, and content or
// target.
func listing(t testing.TB, root string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil || rel == "." {
			return err
		}
		switch d.Type() {
		case 0:
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			out = append(out, fmt.Sprintf("%s=%s", rel, b))
		case fs.ModeDir:
			out = append(out, rel+"/")
		case fs.ModeSymlink:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			out = append(out, rel+"->"+target)
		default:
			out = append(out, rel+" "+d.Type().String())
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(out)
	return out
}

func wantTree(t *testing.T, root string, want ...string) {
	t.Helper()
	slices.Sort(want)
	if got := listing(t, root); !slices.Equal(got, want) {
		t.Errorf("the tree is\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

func stat(t testing.TB, path string) unix.Stat_t {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return st
}
