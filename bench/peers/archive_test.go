package peers

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func TestArchive(t *testing.T) {
	root := t.TempDir()
	for _, dir := range []string{"bin", "tmp"} {
		if err := os.Mkdir(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(root, "tmp"), 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "bin", "tool"), []byte("content"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("tool", filepath.Join(root, "bin", "other")); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	out, again := filepath.Join(dir, "image.tar"), filepath.Join(dir, "again.tar")
	for _, path := range []string{out, again} {
		if err := writeArchive(root, "agentrun/bench:1", path); err != nil {
			t.Fatal(err)
		}
	}
	tag, err := name.NewTag("agentrun/bench:1")
	if err != nil {
		t.Fatal(err)
	}
	image, err := tarball.ImageFromPath(out, &tag)
	if err != nil {
		t.Fatal(err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if config.Architecture != "amd64" || config.OS != "linux" || len(config.RootFS.DiffIDs) != 1 || len(config.Config.Env) != 1 {
		t.Errorf("the image's configuration is %+v", config)
	}

	found := map[string]string{}
	r := tar.NewReader(mutate.Extract(image))
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		found[filepath.Clean(h.Name)] = h.FileInfo().Mode().String() + " " + h.Linkname + string(content)
	}
	for path, want := range map[string]string{
		"bin": "drwxr-xr-x ", "tmp": "dtrwxrwxrwx ", "bin/tool": "-rwxr-xr-x content", "bin/other": "Lrwxrwxrwx tool",
	} {
		if found[path] != want {
			t.Errorf("%s is %q, want %q", path, found[path], want)
		}
	}
	if len(found) != 4 {
		t.Errorf("the image has %v", found)
	}

	first, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	second, err := os.ReadFile(again)
	if err != nil {
		t.Fatal(err)
	}
	if string(first) != string(second) {
		t.Error("the same folder made two different archives")
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*.layer")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}

	if err := writeArchive(filepath.Join(root, "missing"), "agentrun/bench:1", out); err == nil {
		t.Error("a folder that is not there was packed")
	}
	if err := writeArchive(root, "not a name", out); err == nil {
		t.Error("an impossible name was taken")
	}
}
