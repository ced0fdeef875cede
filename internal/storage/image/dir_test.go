package image

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// The superblock (fs/erofs/erofs_fs.h).
const (
	superblock = 1024
	magic      = 0xE0F5E1E2
)

func rootfs(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "bin", "tool"), []byte("hello"), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func wantEmpty(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 0 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

func TestFromDir(t *testing.T) {
	folder := t.TempDir()
	out := filepath.Join(folder, "root.erofs")
	for range 2 { // the second replaces the first
		if err := FromDir(t.Context(), rootfs(t), out); err != nil {
			t.Fatal(err)
		}
	}
	image, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	if len(image) < superblock+128 {
		t.Fatalf("an image of %d bytes", len(image))
	}
	if got := binary.LittleEndian.Uint32(image[superblock:]); got != magic {
		t.Errorf("magic %#x at %d, want %#x: no EROFS", got, superblock, uint32(magic))
	}
	if !strings.Contains(string(image), "hello") {
		t.Error("the file's content is not in the image as it is")
	}
	entries, err := os.ReadDir(folder)
	if err != nil || len(entries) != 1 {
		t.Errorf("beside the image: %v, %v", entries, err)
	}
}

// TestFromDirPlain: the files whose attributes are left out are named.
func TestFromDirPlain(t *testing.T) {
	dir, out := rootfs(t), t.TempDir()
	if err := unix.Setxattr(filepath.Join(dir, "bin", "tool"), "user.note", []byte("a note"), 0); err != nil {
		t.Fatal(err)
	}
	with, without := filepath.Join(out, "with"), filepath.Join(out, "without")
	if err := FromDir(t.Context(), dir, with); err != nil {
		t.Fatal(err)
	}
	lost, err := FromDirPlain(t.Context(), dir, without)
	if err != nil || !slices.Equal(lost, []string{"bin/tool"}) {
		t.Errorf("lost %v, %v", lost, err)
	}
	for path, want := range map[string]bool{with: true, without: false} {
		b, err := os.ReadFile(path)
		if err != nil || bytes.Contains(b, []byte("a note")) != want {
			t.Errorf("%s has the attribute: %v, want %v (%v)", filepath.Base(path), !want, want, err)
		}
	}
	if _, err := FromDirPlain(t.Context(), filepath.Join(out, "none"), without); err == nil {
		t.Error("a folder that is missing was packed")
	}
}

// TestSameBytes: a folder gives the same image whenever it is packed.
func TestSameBytes(t *testing.T) {
	dir, out := rootfs(t), t.TempDir()
	var images [][]byte
	for _, name := range []string{"1", "2"} {
		if err := FromDir(t.Context(), dir, filepath.Join(out, name)); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(out, name))
		if err != nil {
			t.Fatal(err)
		}
		images = append(images, b)
	}
	if !bytes.Equal(images[0], images[1]) {
		t.Error("two images of one folder differ")
	}
	if built := binary.LittleEndian.Uint64(images[0][superblock+buildTimeAt:]); built != 0 {
		t.Errorf("the superblock says that it was built at %d", built)
	}
	if said, err := exec.Command("fsck.erofs", filepath.Join(out, "1")).CombinedOutput(); err != nil {
		t.Errorf("fsck.erofs: %v\n%s", err, said)
	}
}

func TestFromDirErrors(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	missing := filepath.Join(t.TempDir(), "missing")
	for name, dir := range map[string]string{"missing": missing, "not a folder": file} {
		folder := t.TempDir()
		err := FromDir(t.Context(), dir, filepath.Join(folder, "out"))
		if err == nil || !strings.Contains(err.Error(), dir) {
			t.Errorf("%s: %v; want an error that names %s", name, err, dir)
		}
		wantEmpty(t, folder)
	}
	if err := FromDir(t.Context(), rootfs(t), filepath.Join(missing, "out")); err == nil || !strings.Contains(err.Error(), missing) {
		t.Errorf("no folder for the image: %v", err)
	}
}

// TestFromDirLeavesNothing: a packer that fails, is stopped or whose result
// cannot be put in place leaves no part of an image.
func TestFromDirLeavesNothing(t *testing.T) {
	t.Run("stopped", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		folder := t.TempDir()
		if err := FromDir(ctx, rootfs(t), filepath.Join(folder, "out")); err == nil {
			t.Error("an image was made for a caller that had gone")
		}
		wantEmpty(t, folder)
	})
	t.Run("mkfs fails", func(t *testing.T) {
		bin := t.TempDir()
		script := "#!/bin/sh\necho 'disk on fire' >&2\nexit 1\n"
		if err := os.WriteFile(filepath.Join(bin, "mkfs.erofs"), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
		folder, dir := t.TempDir(), rootfs(t)
		err := FromDir(t.Context(), dir, filepath.Join(folder, "out"))
		if err == nil || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "disk on fire") {
			t.Errorf("got %v; want the folder and what mkfs said", err)
		}
		wantEmpty(t, folder)
	})
	t.Run("mkfs is missing", func(t *testing.T) {
		t.Setenv("PATH", t.TempDir())
		folder := t.TempDir()
		err := FromDir(t.Context(), rootfs(t), filepath.Join(folder, "out"))
		if err == nil || !strings.Contains(err.Error(), "erofs-utils") {
			t.Errorf("got %v; want the package to install", err)
		}
		wantEmpty(t, folder)
	})
	t.Run("a folder is in the way", func(t *testing.T) {
		folder := t.TempDir()
		out := filepath.Join(folder, "out")
		if err := os.Mkdir(out, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := FromDir(t.Context(), rootfs(t), out); err == nil || !strings.Contains(err.Error(), out) {
			t.Errorf("got %v; want an error that names %s", err, out)
		}
		if err := os.Remove(out); err != nil {
			t.Fatal(err)
		}
		wantEmpty(t, folder)
	})
}

// TestUnnamed: the file is FromDir's, or FromDirPlain's, and has no name.
func TestUnnamed(t *testing.T) {
	dir, out := rootfs(t), filepath.Join(t.TempDir(), "out")
	if err := unix.Setxattr(filepath.Join(dir, "bin", "tool"), "user.note", []byte("x"), 0); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", t.TempDir())
	for plain, named := range map[bool]func() ([]string, error){
		false: func() ([]string, error) { return nil, FromDir(t.Context(), dir, out) },
		true:  func() ([]string, error) { return FromDirPlain(t.Context(), dir, out) },
	} {
		wantLost, err := named()
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		f, lost, err := Unnamed(t.Context(), dir, plain)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(f)
		if err != nil || !bytes.Equal(got, want) || !slices.Equal(lost, wantLost) {
			t.Errorf("plain %v: %d bytes, not the %d of the named one; lost %q, %v", plain, len(got), len(want), lost, err)
		}
		if _, err := f.WriteAt([]byte("x"), 0); err == nil {
			t.Error("it can be written to")
		}
		wantEmpty(t, os.TempDir())
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, _, err := Unnamed(t.Context(), out, false); err == nil {
		t.Error("a file was packed")
	}
	wantEmpty(t, os.TempDir())
}

// TestPlain: extended attributes are left out, and the files that had some are
// named.
func TestPlain(t *testing.T) {
	dir := rootfs(t)
	tool := filepath.Join(dir, "bin", "tool")
	if err := unix.Setxattr(tool, "user.note", []byte("unmistakable"), 0); err != nil {
		t.Fatalf("this file system has no extended attributes: set TMPDIR to one that has: %v", err)
	}
	out := filepath.Join(t.TempDir(), "root.erofs")
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	lost, err := FromDirPlain(t.Context(), link, out)
	if err != nil || len(lost) != 1 || lost[0] != "bin/tool" {
		t.Errorf("lost %q, %v", lost, err)
	}
	plain, err := os.ReadFile(out)
	if err != nil || strings.Contains(string(plain), "unmistakable") {
		t.Errorf("the attribute is in the image (%v)", err)
	}
	if !strings.Contains(string(plain), "hello") {
		t.Error("the folder behind the link is not in the image")
	}
	if err := FromDir(t.Context(), link, out); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(out); err != nil || !strings.Contains(string(b), "unmistakable") {
		t.Errorf("the attribute is not in an image that keeps them (%v)", err)
	}
	if _, err := FromDirPlain(t.Context(), filepath.Join(dir, "missing"), out); err == nil {
		t.Error("a folder that is not there was packed")
	}
}
