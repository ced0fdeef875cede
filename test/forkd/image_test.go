package forkd

import (
	"compress/gzip"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// shared is a folder for files that all tests use.
var shared string

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	var err error
	if shared, err = os.MkdirTemp("", "agentrun-forkd-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(shared) }()
	return m.Run()
}

// pythonImage returns an archive of an image with Python, python:3.12-slim, in
// the format of docker save.
func pythonImage(t *testing.T) string {
	t.Helper()
	path, err := makePythonImage()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

var makePythonImage = sync.OnceValues(func() (string, error) {
	root, layer, out := filepath.Join(shared, "root"), filepath.Join(shared, "layer.tar"), filepath.Join(shared, "image.tar")
	if said, err := exec.Command("../../guest/rootfs/python.sh", root).CombinedOutput(); err != nil {
		return "", fmt.Errorf("make a root filesystem: %w\n%s", err, said)
	}
	if said, err := exec.Command("tar", "-C", root, "-cf", layer, ".").CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w\n%s", err, said)
	}
	// With the race detector, compression would take far longer than the tests.
	l, err := tarball.LayerFromFile(layer, tarball.WithCompressionLevel(gzip.NoCompression))
	if err != nil {
		return "", err
	}
	img, err := mutate.AppendLayers(empty.Image, l)
	if err != nil {
		return "", err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return "", err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", "amd64"
	config.Config.Env = []string{"PATH=/bin:/usr/bin:/sbin", "FROM_IMAGE=yes"}
	if img, err = mutate.ConfigFile(img, config); err != nil {
		return "", err
	}
	tag, err := name.NewTag("python:3.12-slim")
	if err != nil {
		return "", err
	}
	return out, tarball.WriteToFile(out, tag, img)
})
