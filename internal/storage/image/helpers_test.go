package image

import (
	"archive/tar"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	erofs "github.com/erofs/go-erofs"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
)

func newStore(t *testing.T) *Store {
	t.Helper()
	s, err := OpenStore(filepath.Join(t.TempDir(), "images"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// wantTidy: nothing of work in progress is left.
func wantTidy(t *testing.T, s *Store) {
	t.Helper()
	for _, d := range []string{workName} {
		entries, err := os.ReadDir(s.path(d))
		if err != nil || len(entries) != 0 {
			t.Errorf("left in %s: %v, %v", d, entries, err)
		}
	}
}

// testRegistry is a registry on a real listener, with hooks.
type testRegistry struct {
	host string
	// certificate is its authority's, as PEM, if it speaks TLS.
	certificate []byte
	mu          sync.Mutex // protects the following fields
	gets        map[string]int
	// intercept may answer a request in the registry's place.
	intercept func(w http.ResponseWriter, r *http.Request) bool
	user      string // and password, if it wants one
}

type registryKind int

const (
	withTLS registryKind = iota
	plainHTTP
)

func newRegistry(t *testing.T, kind registryKind) *testRegistry {
	t.Helper()
	r := &testRegistry{gets: map[string]int{}}
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	handler := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.mu.Lock()
		if req.Method == http.MethodGet {
			r.gets[req.URL.Path]++
		}
		intercept, user := r.intercept, r.user
		r.mu.Unlock()
		if got, password, _ := req.BasicAuth(); user != "" && (got != user || password != "secret") {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		if intercept != nil && intercept(w, req) {
			return
		}
		inner.ServeHTTP(w, req)
	})
	server := httptest.NewUnstartedServer(handler)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	if kind == withTLS {
		server.StartTLS()
		r.certificate = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	} else {
		server.Start()
	}
	t.Cleanup(server.Close)
	r.host = server.Listener.Addr().String()
	return r
}

func (r *testRegistry) set(f func(w http.ResponseWriter, r *http.Request) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.intercept = f
}

// blobGets counts how often layers and configurations were fetched.
func (r *testRegistry) blobGets() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for path, times := range r.gets {
		if strings.Contains(path, "/blobs/") {
			n += times
		}
	}
	return n
}

func (r *testRegistry) caFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(path, r.certificate, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// options reach the registry.
func (r *testRegistry) options(t *testing.T) PullOptions {
	if r.certificate == nil {
		return PullOptions{Registries: Registries{Hosts: map[string]Registry{r.host: {PlainHTTP: true}}}}
	}
	return PullOptions{Registries: Registries{CAFiles: []string{r.caFile(t)}}}
}

// push puts an image or an index into the registry.
func (r *testRegistry) push(t *testing.T, repository string, what remote.Taggable) Reference {
	t.Helper()
	ref, err := name.ParseReference(r.host+"/"+repository, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(r.certificate)
	via := remote.WithTransport(&http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}})
	switch what := what.(type) {
	case v1.Image:
		err = remote.Write(ref, what, via)
	case v1.ImageIndex:
		err = remote.WriteIndex(ref, what, via)
	default:
		t.Fatalf("push %T", what)
	}
	if err != nil {
		t.Fatal(err)
	}
	return mustRef(t, ref.Name())
}

func mustRef(t *testing.T, text string) Reference {
	t.Helper()
	ref, err := ParseReference(text)
	if err != nil {
		t.Fatal(err)
	}
	return ref
}

// tarOf is an archive of files by name; names that end with / are folders.
func tarOf(t *testing.T, files map[string]string, more ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	write := func(h tar.Header, content string) {
		h.Size = int64(len(content))
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	names := make([]string, 0, len(files))
	for n := range files {
		names = append(names, n)
	}
	slices.Sort(names)
	for _, n := range names {
		h := tar.Header{Name: n, Typeflag: tar.TypeReg, Mode: 0o755, ModTime: time.Unix(1e9, 0)}
		if strings.HasSuffix(n, "/") {
			h.Typeflag = tar.TypeDir
		}
		write(h, files[n])
	}
	for _, h := range more {
		write(h, "")
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// layerOf is a gzip-compressed layer.
func layerOf(t *testing.T, archive []byte) v1.Layer {
	t.Helper()
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(archive)), nil })
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// rawLayer is a layer whose blob is given, and whose DiffID is another's.
type rawLayer struct {
	v1.Layer
	diffID v1.Hash
}

func (l rawLayer) DiffID() (v1.Hash, error) { return l.diffID, nil }

func zstdLayer(t *testing.T, archive []byte) v1.Layer {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	return withDiffID(t, static.NewLayer(w.EncodeAll(archive, nil), types.OCILayerZStd), archive)
}

func plainLayer(t *testing.T, archive []byte) v1.Layer {
	t.Helper()
	return withDiffID(t, static.NewLayer(archive, types.OCIUncompressedLayer), archive)
}

func withDiffID(t *testing.T, l v1.Layer, archive []byte) v1.Layer {
	t.Helper()
	h, _, err := v1.SHA256(bytes.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	return rawLayer{Layer: l, diffID: h}
}

// imageOf is an image of layers for linux/amd64.
func imageOf(t *testing.T, config v1.Config, layers ...v1.Layer) v1.Image {
	t.Helper()
	return imageFor(t, "amd64", config, layers...)
}

func imageFor(t *testing.T, arch string, config v1.Config, layers ...v1.Layer) v1.Image {
	t.Helper()
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	var err error
	for _, l := range layers {
		mt, mtErr := l.MediaType()
		if mtErr != nil {
			t.Fatal(mtErr)
		}
		if img, err = mutate.Append(img, mutate.Addendum{Layer: l, MediaType: mt}); err != nil {
			t.Fatal(err)
		}
	}
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cf = cf.DeepCopy()
	cf.OS, cf.Architecture, cf.Config = "linux", arch, config
	if img, err = mutate.ConfigFile(img, cf); err != nil {
		t.Fatal(err)
	}
	return img
}

func digestOf(t *testing.T, img v1.Image) Digest {
	t.Helper()
	h, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	return Digest(h.String())
}

// content reads all files of an image's root with a reader that is not ours.
func content(t *testing.T, s *Store, d Digest, plain bool) map[string]string {
	t.Helper()
	h, err := s.Open(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	open := h.Root
	if plain {
		open = h.PlainRoot
	}
	f, err := open()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	image, err := erofs.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	err = fs.WalkDir(image, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := fs.ReadFile(image, path)
		out[path] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func wantContent(t *testing.T, s *Store, d Digest, want map[string]string) {
	t.Helper()
	if got := content(t, s, d, false); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("the image holds %v, want %v", got, want)
	}
}

// dockerConfig makes credentials that docker login would have left.
func dockerConfig(t *testing.T, host, user, password string) {
	t.Helper()
	auth := base64.StdEncoding.EncodeToString([]byte(user + ":" + password))
	b, err := json.Marshal(map[string]any{"auths": map[string]any{host: map[string]string{"auth": auth}}})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DOCKER_CONFIG", dir)
}

// cut ends a connection in the middle of an answer.
func cut(t *testing.T, w http.ResponseWriter, length int, sent []byte) {
	w.Header().Set("Content-Length", fmt.Sprint(length))
	w.WriteHeader(http.StatusOK)
	_, _ = w.Write(sent)
	_ = http.NewResponseController(w).Flush()
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		t.Error(err)
		return
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
}
