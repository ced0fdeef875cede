package snapshot

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"syscall"
	"testing"

	"agentrun.dev/internal/storage/layer"
	"golang.org/x/sys/unix"
)

func TestSnapshot(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "one")
	made := build(t, dir)
	s := opened(t, dir)
	if s.ID() != made.ID() || !reflect.DeepEqual(s.Manifest(), made.Manifest()) || !bytes.Equal(s.State(), state) {
		t.Errorf("opened %s %+v, made %s %+v", s.ID(), s.Manifest(), made.ID(), made.Manifest())
	}
	if got := names(t, filepath.Dir(dir)); !slices.Equal(got, []string{"one"}) {
		t.Errorf("beside the snapshot there are %v", got)
	}
	for _, ref := range s.Manifest().Layers() {
		f, err := s.OpenLayer(ref)
		if err != nil {
			t.Fatal(err)
		}
		if n, err := io.Copy(io.Discard, f); err != nil || uint64(n) != ref.Size {
			t.Errorf("layer of %d bytes: %d, %v", ref.Size, n, err)
		}
		if _, err := f.Write([]byte{1}); !errors.Is(err, unix.EBADF) {
			t.Errorf("write to a layer: %v", err)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := s.Verify(t.Context()); err == nil {
		t.Error("a closed snapshot was verified")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := made.Verify(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of the context: %v", err)
	}
}

// TestOpenDamaged damages one file at a time.
func TestOpenDamaged(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "one")
	s := build(t, dir)
	memory := s.Manifest().Layers()[0].Digest.String()
	for _, c := range []struct {
		name, file string
		damage     func(t *testing.T, path string, content []byte)
		say        string // empty: only Verify notices it
		verify     string
	}{
		{"state truncated", stateName, func(t *testing.T, p string, b []byte) { rewrite(t, p, b[1:]) }, "state is damaged: it has 21 bytes", ""},
		{"state flipped", stateName, flip, "state is damaged", ""},
		{"state empty", stateName, func(t *testing.T, p string, _ []byte) { rewrite(t, p, nil) }, "state is damaged", ""},
		{"state huge", stateName, func(t *testing.T, p string, _ []byte) { rewrite(t, p, make([]byte, MaxState+1)) }, "more than 16777216", ""},
		{"no state", stateName, gone, "state: no such file", ""},
		{"manifest truncated", manifestName, func(t *testing.T, p string, b []byte) { rewrite(t, p, b[:len(b)/2]) }, "manifest.json: damaged", ""},
		{"manifest flipped", manifestName, flip, "manifest.json: damaged", ""},
		{"no manifest", manifestName, gone, "manifest.json: no such file", ""},
		{"manifest is a link", manifestName, link, "manifest.json is not a regular file", ""},
		{"no layers", layersName, moved, "no such file", ""},
		{"layers is a file", layersName, func(t *testing.T, p string, _ []byte) {
			moved(t, p, nil)
			if err := os.WriteFile(p, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}, "not a directory", ""},
		{"layer truncated", layersName + "/" + memory, func(t *testing.T, p string, b []byte) { rewrite(t, p, b[1:]) }, "layer " + memory + " is damaged: it has 409599 bytes, the manifest says 409600", ""},
		{"layer longer", layersName + "/" + memory, func(t *testing.T, p string, b []byte) { rewrite(t, p, append(b, 1)) }, "409601 bytes", ""},
		{"layer gone", layersName + "/" + memory, gone, memory + ": no such file", ""},
		{"layer is a link", layersName + "/" + memory, link, "not a regular file", ""},
		{"layer is a FIFO", layersName + "/" + memory, func(t *testing.T, p string, _ []byte) {
			gone(t, p, nil)
			if err := unix.Mkfifo(p, 0o600); err != nil {
				t.Fatal(err)
			}
		}, "not a regular file", ""},
		{"layer is a folder", layersName + "/" + memory, func(t *testing.T, p string, _ []byte) {
			gone(t, p, nil)
			if err := os.Mkdir(p, 0o700); err != nil {
				t.Fatal(err)
			}
		}, "not a regular file", ""},
		{"layer flipped", layersName + "/" + memory, flip, "", "layer " + memory},
	} {
		t.Run(c.name, func(t *testing.T) {
			bad := filepath.Join(t.TempDir(), "bad")
			copyFolder(t, dir, bad)
			path := filepath.Join(bad, c.file)
			content, err := os.ReadFile(path)
			if err != nil && c.file != layersName {
				t.Fatal(err)
			}
			c.damage(t, path, content)
			s, err := Open(bad)
			if c.say != "" {
				wantError(t, err, "open snapshot "+bad, c.say)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			wantError(t, s.Verify(t.Context()), "verify snapshot "+s.ID().String(), c.verify, "damaged")
		})
	}
	_, err := Open(filepath.Join(dir, "none"))
	wantError(t, err, "open snapshot", "no such file")
}

func flip(t *testing.T, path string, content []byte) {
	content[len(content)/2] ^= 1
	rewrite(t, path, content)
}

func gone(t *testing.T, path string, _ []byte) {
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
}

// link moves the file to another name and puts a symbolic link in its place.
func link(t *testing.T, path string, _ []byte) {
	moved(t, path, nil)
	if err := os.Symlink(filepath.Base(path)+".moved", path); err != nil {
		t.Fatal(err)
	}
}

func moved(t *testing.T, path string, _ []byte) {
	if err := os.Rename(path, path+".moved"); err != nil {
		t.Fatal(err)
	}
}

func copyFolder(t *testing.T, from, to string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "cp", "-a", from, to).CombinedOutput(); err != nil {
		t.Fatalf("cp: %v\n%s", err, out)
	}
}

func TestMovedAndCopied(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "one")
	s := build(t, dir)
	there := filepath.Join(parent, "elsewhere")
	if err := os.Rename(dir, there); err != nil {
		t.Fatal(err)
	}
	if err := s.Verify(t.Context()); err != nil {
		t.Errorf("moved while open: %v", err)
	}
	copied := filepath.Join(t.TempDir(), "copy")
	copyFolder(t, there, copied)
	for _, dir := range []string{there, copied} {
		if got := opened(t, dir); got.ID() != s.ID() {
			t.Errorf("%s has id %s, was %s", dir, got.ID(), s.ID())
		}
	}
}

func links(t *testing.T, s *Snapshot, ref layer.Ref) uint64 {
	t.Helper()
	f, err := s.OpenLayer(ref)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	return info.Sys().(*syscall.Stat_t).Nlink
}

// child makes a snapshot at dir with the layers of parent.
func child(t *testing.T, dir string, parent *Snapshot) *Snapshot {
	t.Helper()
	b, err := NewBuilder(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Abort()
	refs := parent.Manifest().Layers()
	for _, ref := range append(refs, refs...) { // the second time does nothing
		if err := b.LinkLayer(ref, parent); err != nil {
			t.Fatal(err)
		}
	}
	extra, f := layerFile(t, 9, 1) // not used
	if err := b.AddLayer(extra, f); err != nil {
		t.Fatal(err)
	}
	m := manifest(refs[0], refs[1])
	m.Parent = parent.ID().String()
	s, err := b.Commit(m, []byte("another state"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() }) // only read from
	if got := len(names(t, filepath.Join(dir, layersName))); got != 2 {
		t.Errorf("%d layers in the folder", got)
	}
	return s
}

func TestLinkLayer(t *testing.T) {
	home := t.TempDir()
	parent := build(t, filepath.Join(home, "parent"))
	refs := parent.Manifest().Layers()
	c := child(t, filepath.Join(home, "child"), parent)
	for _, ref := range refs {
		if n := links(t, c, ref); n != 2 {
			t.Errorf("layer with %d links", n)
		}
	}
	if err := Remove(filepath.Join(home, "parent")); err != nil {
		t.Fatal(err)
	}
	if got := names(t, home); !slices.Equal(got, []string{"child"}) {
		t.Errorf("after Remove there are %v", got)
	}
	s := opened(t, filepath.Join(home, "child"))
	if n := links(t, s, refs[0]); n != 1 {
		t.Errorf("layer with %d links", n)
	}

	// A layer from another file system is copied.
	shm, err := os.MkdirTemp("/dev/shm", "snapshot-test-")
	if err != nil {
		t.Fatalf("this test needs a tmpfs at /dev/shm: %v", err)
	}
	defer os.RemoveAll(shm)
	far := child(t, filepath.Join(shm, "far"), s)
	if n := links(t, far, refs[0]); n != 1 {
		t.Errorf("layer with %d links", n)
	}
	if err := far.Verify(t.Context()); err != nil {
		t.Error(err)
	}
	// The copy is verified: a damaged layer is not copied.
	path := filepath.Join(shm, "far", layersName, refs[0].Digest.String())
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	flip(t, path, content)
	b, err := NewBuilder(filepath.Join(home, "back"))
	if err != nil {
		t.Fatal(err)
	}
	wantError(t, b.LinkLayer(refs[0], far), "add layer "+refs[0].Digest.String(), "damaged")
	gone(t, path, nil)
	if err := b.LinkLayer(refs[0], far); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("link a missing layer: %v", err)
	}
	if err := b.Abort(); err != nil {
		t.Error(err)
	}
	if got := names(t, home); !slices.Equal(got, []string{"child"}) {
		t.Errorf("after Abort there are %v", got)
	}
}

func TestLinkFile(t *testing.T) {
	home := t.TempDir()
	ref, f := layerFile(t, 7, 5)
	inode := func(path string) uint64 {
		info, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		return info.Sys().(*syscall.Stat_t).Ino
	}
	for _, c := range []struct {
		name   string
		mode   os.FileMode
		linked bool
	}{{"writable", 0o600, false}, {"fixed", 0o444, true}} {
		if err := f.Chmod(c.mode); err != nil {
			t.Fatal(err)
		}
		b, err := NewBuilder(filepath.Join(home, c.name))
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := b.LinkFile(ref, f.Name()); err != nil {
				t.Fatal(err)
			}
		}
		copied := filepath.Join(home, b.temp, layersName, ref.Digest.String())
		if linked := inode(copied) == inode(f.Name()); linked != c.linked {
			t.Errorf("%s: linked is %v", c.name, linked)
		}
		other := layer.Ref{Digest: layer.Digest{1}, Size: ref.Size}
		wantError(t, b.LinkFile(other, f.Name()), f.Name(), other.Digest.String())
		wantError(t, b.LinkFile(other, home), home, "not a regular file")
		wantError(t, b.LinkFile(other, "/none"), "no such file")
		wantError(t, b.LinkFile(layer.Ref{Digest: ref.Digest, Size: page}, f.Name()), "20480 bytes, not 4096")
		if err := b.Abort(); err != nil {
			t.Error(err)
		}
		wantError(t, b.LinkFile(ref, f.Name()), "aborted")
	}
}
