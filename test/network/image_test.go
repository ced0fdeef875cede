package network

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// roots has the layers made by scripts under guest/rootfs. Each is made once for all
// tests.
var roots struct {
	sync.Mutex
	layers map[string]v1.Layer
}

// rootLayer returns the output of a script as a layer.
func rootLayer(t *testing.T, script string) v1.Layer {
	t.Helper()
	roots.Lock()
	defer roots.Unlock()
	if l := roots.layers[script]; l != nil {
		return l
	}
	l := layerOf(t, rootArchive(t, script))
	if roots.layers == nil {
		roots.layers = map[string]v1.Layer{}
	}
	roots.layers[script] = l
	return l
}

// rootsFolder names the environment variable for a folder with archives of the scripts'
// output, because the scripts take minutes in an emulated machine.
const rootsFolder = "AGENTRUN_TEST_ROOTS"

// rootArchive returns the output of a script as a tar archive.
func rootArchive(t *testing.T, script string) []byte {
	t.Helper()
	if folder := os.Getenv(rootsFolder); folder != "" {
		archive, err := os.ReadFile(filepath.Join(folder, script+".tar"))
		if err != nil {
			t.Fatal(err)
		}
		return archive
	}
	root := filepath.Join(t.TempDir(), "root")
	if said, err := exec.Command("../../guest/rootfs/"+script, root).CombinedOutput(); err != nil {
		t.Fatalf("make a root filesystem: %v\n%s", err, said)
	}
	archive, err := exec.Command("tar", "-C", root, "-cf", "-", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	return archive
}

// trustLayer returns a layer with the certificates of the world, where Debian's
// programs look for them.
func (s *site) trustLayer(t *testing.T) v1.Layer {
	t.Helper()
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	pem := s.Authority()
	for _, path := range []string{"etc/ssl/certs/ca-certificates.crt", "usr/lib/ssl/cert.pem"} {
		err := w.WriteHeader(&tar.Header{Name: path, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(pem))})
		if err == nil {
			_, err = w.Write(pem)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return layerOf(t, archive.Bytes())
}

// layerOf makes a layer of a tar archive. It is not compressed, because that takes
// longer than it saves, far longer in an emulated machine.
func layerOf(t *testing.T, archive []byte) v1.Layer {
	t.Helper()
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(archive)), nil },
		tarball.WithCompressionLevel(gzip.NoCompression), tarball.WithCompressedCaching)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// importImage imports an image into the daemon: the output of a script under
// guest/rootfs, with trust in the world's servers.
func (s *site) importImage(t *testing.T, ref, script string) {
	t.Helper()
	img, err := mutate.AppendLayers(empty.Image, rootLayer(t, script), s.trustLayer(t))
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", "amd64"
	config.Config.Env = []string{"PATH=/bin:/usr/bin:/sbin"}
	if img, err = mutate.ConfigFile(img, config); err != nil {
		t.Fatal(err)
	}
	tag, err := name.NewTag(ref)
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "image.tar")
	if err := tarball.WriteToFile(out, tag, img); err != nil {
		t.Fatal(err)
	}
	s.must(t, "image", "import", out)
}
