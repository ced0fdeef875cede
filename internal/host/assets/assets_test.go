package assets

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestOpen(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(EnvFolder, dir)
	if err := os.WriteFile(filepath.Join(dir, string(Kernel)), []byte("kernel"), 0o600); err != nil {
		t.Fatal(err)
	}
	if path, err := Path(Kernel); err != nil || path != filepath.Join(dir, "vmlinux") {
		t.Errorf("path %q, %v", path, err)
	}
	f, err := Open(Kernel)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if b, err := io.ReadAll(f); err != nil || string(b) != "kernel" {
		t.Errorf("%q, %v", b, err)
	}
}

func TestCacheFolder(t *testing.T) {
	t.Setenv(EnvCache, "/somewhere/../cache")
	if dir, err := CacheFolder(); err != nil || dir != "/cache" {
		t.Errorf("%q, %v", dir, err)
	}
	t.Setenv(EnvCache, "")
	t.Setenv("XDG_CACHE_HOME", "/cache")
	if dir, err := CacheFolder(); err != nil || dir != "/cache/agentrun" {
		t.Errorf("%q, %v", dir, err)
	}
	t.Setenv("XDG_CACHE_HOME", "")
	t.Setenv("HOME", "")
	if dir, err := CacheFolder(); err == nil || !strings.Contains(err.Error(), EnvCache) {
		t.Errorf("without a home: %q, %v", dir, err)
	}
}

// TestMissing: the error names the missing file, its folder and the next step.
func TestMissing(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(EnvFolder, dir)
	_, err := Open(GuestAgent)
	for _, word := range []string{string(GuestAgent), dir, "make build", EnvFolder} {
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%v: does not say %q", err, word)
		}
	}
}

// TestUnreadable: if an asset is inaccessible for a reason other than a missing
// file, the error gives that reason.
func TestUnreadable(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(EnvFolder, file)
	if _, err := Path(VMM); err == nil || !strings.Contains(err.Error(), "not a directory") {
		t.Errorf("a file as the folder: %v", err)
	}
}

func TestFolder(t *testing.T) {
	t.Run("relative", func(t *testing.T) {
		t.Chdir(t.TempDir())
		t.Setenv(EnvFolder, "build")
		wd, err := os.Getwd()
		if err != nil {
			t.Fatal(err)
		}
		if dir, err := Folder(); err != nil || dir != filepath.Join(wd, "build") {
			t.Errorf("%q, %v", dir, err)
		}
	})
	t.Run("of the program", func(t *testing.T) {
		t.Setenv(EnvFolder, "")
		exe, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		if exe, err = filepath.EvalSymlinks(exe); err != nil {
			t.Fatal(err)
		}
		if dir, err := Folder(); err != nil || dir != filepath.Dir(exe) {
			t.Errorf("%q, %v; want the folder of %s", dir, err, exe)
		}
	})
}
