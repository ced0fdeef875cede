package pack

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/storage/image"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

const page = layer.PageSize

// content describes a layer: zeros, and some pages that do not compress.
type content struct {
	size  uint64
	pages []uint64 // their numbers
	seed  byte
}

func (c content) write(t testing.TB) (layer.Ref, *os.File) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "layer"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() }) // only read from, later
	if err := f.Truncate(int64(c.size)); err != nil {
		t.Fatal(err)
	}
	x := uint32(c.seed) + 1
	for _, n := range c.pages {
		b := make([]byte, page)
		for i := range b {
			x ^= x << 13
			x ^= x >> 17
			x ^= x << 5
			b[i] = byte(x)
		}
		if _, err := f.WriteAt(b, int64(n*page)); err != nil {
			t.Fatal(err)
		}
	}
	w := layer.NewWriter(io.Discard)
	if _, err := io.Copy(w, f); err != nil {
		t.Fatal(err)
	}
	return w.Ref(), f
}

// whole is a stack of one layer.
func whole(r layer.Ref) snapshot.Stack {
	return snapshot.StackOf(layer.Stack{Size: r.Size, Layers: []layer.Ref{r}, Extents: []layer.Extent{{Length: r.Size}}})
}

// makeSnapshot makes a snapshot of a memory and a disk.
func makeSnapshot(t testing.TB, memory, disk content, edit ...func(*snapshot.Manifest)) *snapshot.Snapshot {
	t.Helper()
	return makeWith(t, nil, memory, disk, edit...)
}

func makeWith(t testing.TB, options []snapshot.Option, memory, disk content, edit ...func(*snapshot.Manifest)) *snapshot.Snapshot {
	t.Helper()
	m, mf := memory.write(t)
	d, df := disk.write(t)
	snap, err := snapshot.Make(filepath.Join(t.TempDir(), "source"), func(b *snapshot.Builder) (*snapshot.Snapshot, error) {
		if err := errors.Join(b.AddLayer(m, mf), b.AddLayer(d, df)); err != nil {
			return nil, err
		}
		manifest := snapshot.Manifest{
			Created: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), Kernel: strings.Repeat("ab", 32),
			CPU: snapshot.CPU{Profile: "host-v1", Vendor: "AuthenticAMD", Family: 23, Model: 1}, TSCKHz: 2_400_000,
			VCPUs: 1, Memory: whole(m), Disks: []snapshot.Disk{{ID: "root", ReadOnly: true, Stack: whole(d)}},
		}
		for _, e := range edit {
			e(&manifest)
		}
		return b.Commit(manifest, []byte("processors and devices"))
	}, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = snap.Close() }) // only read from
	return snap
}

// onGVisor turns the manifest into that of a sandbox on gVisor.
func onGVisor(m *snapshot.Manifest) {
	m.Engine, m.Kernel, m.TSCKHz = snapshot.EngineGVisor, "", 0
	m.GVisor = &snapshot.GVisor{Helper: strings.Repeat("ab", 32), Platform: "systrap", CPUFeatures: []string{"sse2"}, Pages: m.Memory.Layers[0]}
	m.Memory = snapshot.Stack{Size: 128 << 20}
}

// small is a small snapshot: 16 pages of memory, 4 of disk.
func small(t testing.TB, edit ...func(*snapshot.Manifest)) *snapshot.Snapshot {
	return makeSnapshot(t, content{size: 16 * page, pages: []uint64{3, 4, 9}}, content{size: 4 * page, pages: []uint64{0}, seed: 7}, edit...)
}

func packed(t testing.TB, snap *snapshot.Snapshot, o PackOptions) []byte {
	t.Helper()
	var out bytes.Buffer
	if _, err := Write(t.Context(), &out, snap, o); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// unpackInto unpacks into an empty folder.
func unpackInto(t testing.TB, b []byte, o UnpackOptions) (*snapshot.Snapshot, string, error) {
	t.Helper()
	parent := t.TempDir()
	snap, err := Read(t.Context(), bytes.NewReader(b), int64(len(b)), filepath.Join(parent, "snapshot"), o)
	if snap != nil {
		t.Cleanup(func() { _ = snap.Close() }) // only read from
	}
	return snap, parent, err
}

// wantRefused checks that err contains these words, and that parent is empty.
func wantRefused(t *testing.T, parent string, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("it was accepted; want %q", words)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
	entries, readErr := os.ReadDir(parent)
	if readErr != nil || len(entries) > 0 {
		t.Errorf("left over: %v, %v", entries, readErr)
	}
}

// wantSame checks that both snapshots have the same content.
func wantSame(t *testing.T, got, want *snapshot.Snapshot) {
	t.Helper()
	if got.ID() != want.ID() || !bytes.Equal(got.State(), want.State()) {
		t.Errorf("snapshot %s became %s", want.ID(), got.ID())
	}
	if err := got.Verify(t.Context()); err != nil {
		t.Error(err)
	}
}

// file is an entry of an archive.
type file struct {
	header  tar.Header
	content []byte
}

// bundle is a pack that a test can edit.
type bundle struct {
	t     testing.TB
	files []file
}

func open(t testing.TB, b []byte) *bundle {
	t.Helper()
	out := &bundle{t: t}
	for r := tar.NewReader(bytes.NewReader(b)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		out.files = append(out.files, file{*h, content})
	}
}

func (b *bundle) bytes() []byte {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, f := range b.files {
		if f.header.Typeflag == tar.TypeReg {
			f.header.Size = int64(len(f.content))
		}
		if err := w.WriteHeader(&f.header); err != nil {
			b.t.Fatal(err)
		}
		if _, err := w.Write(f.content); err != nil {
			b.t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		b.t.Fatal(err)
	}
	return out.Bytes()
}

func (b *bundle) add(name string, content []byte) {
	b.files = append(b.files, file{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o444}, content})
}

func (b *bundle) addBlob(content []byte) v1.Descriptor {
	d := describe(content)
	b.add(blobPrefix+d.Digest.Hex, content)
	return d
}

func (b *bundle) find(name string) *file {
	for i := range b.files {
		if b.files[i].header.Name == name {
			return &b.files[i]
		}
	}
	b.t.Fatalf("no entry %s", name)
	return nil
}

func (b *bundle) remove(name string) {
	for i := range b.files {
		if b.files[i].header.Name == name {
			b.files = append(b.files[:i], b.files[i+1:]...)
			return
		}
	}
	b.t.Fatalf("no entry %s", name)
}

func blobName(d v1.Descriptor) string { return blobPrefix + d.Digest.Hex }

func decode[T any](t testing.TB, raw []byte) (v T) {
	t.Helper()
	if err := json.Unmarshal(raw, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

func encode(t testing.TB, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// manifest changes the manifest, and all digests of it, so that the change is
// the only error.
func (b *bundle) manifest(edit func(*v1.Manifest)) {
	index := decode[v1.IndexManifest](b.t, b.find(indexName).content)
	old := blobName(index.Manifests[0])
	m := decode[v1.Manifest](b.t, b.find(old).content)
	edit(&m)
	b.replaceManifest(&index, encode(b.t, m))
}

func (b *bundle) replaceManifest(index *v1.IndexManifest, raw []byte) {
	b.remove(blobName(index.Manifests[0]))
	d := b.addBlob(raw)
	index.Manifests[0].Digest, index.Manifests[0].Size = d.Digest, d.Size
	b.find(indexName).content = encode(b.t, *index)
}

// replace changes a blob that the manifest names, and its descriptor.
func (b *bundle) replace(d *v1.Descriptor, content []byte) {
	b.remove(blobName(*d))
	n := b.addBlob(content)
	d.Digest, d.Size = n.Digest, n.Size
}

// testRegistry is a registry on a real listener, which counts requests.
type testRegistry struct {
	host string
	mu   sync.Mutex // protects the following fields
	sent map[string]int
	// intercept may answer a request instead of the registry.
	intercept func(http.ResponseWriter, *http.Request) bool
}

func newRegistry(t testing.TB) *testRegistry {
	t.Helper()
	r := &testRegistry{sent: map[string]int{}}
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.mu.Lock()
		kind := "manifest"
		if strings.Contains(req.URL.Path, "/blobs/") {
			kind = "blob"
		}
		r.sent[req.Method+" "+kind]++
		intercept := r.intercept
		r.mu.Unlock()
		if intercept == nil || !intercept(w, req) {
			inner.ServeHTTP(w, req)
		}
	}))
	t.Cleanup(server.Close)
	r.host = server.Listener.Addr().String()
	return r
}

// count returns how many requests of a kind there were since its last call.
func (r *testRegistry) count(what string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.sent[what]
	r.sent[what] = 0
	return n
}

func (r *testRegistry) set(f func(http.ResponseWriter, *http.Request) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.intercept = f
}

func (r *testRegistry) registries() image.Registries {
	return image.Registries{Hosts: map[string]image.Registry{r.host: {PlainHTTP: true}}}
}

func (r *testRegistry) ref(t testing.TB, name string) image.Reference {
	t.Helper()
	ref, err := image.ParseReference(r.host + "/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return ref
}

func (r *testRegistry) push(t testing.TB, name string, snap *snapshot.Snapshot, o PackOptions) v1.Hash {
	t.Helper()
	digest, err := Push(t.Context(), snap, r.ref(t, name), r.registries(), o)
	if err != nil {
		t.Fatal(err)
	}
	return digest
}

func (r *testRegistry) pull(t testing.TB, name string, o UnpackOptions) (*snapshot.Snapshot, string, error) {
	t.Helper()
	parent := t.TempDir()
	snap, err := Pull(t.Context(), r.ref(t, name), filepath.Join(parent, "snapshot"), r.registries(), o)
	if snap != nil {
		t.Cleanup(func() { _ = snap.Close() }) // only read from
	}
	return snap, parent, err
}

// put stores a bundle in the registry without a check.
func (r *testRegistry) put(t testing.TB, name string, b *bundle) {
	t.Helper()
	repo, err := r.registries().Open(r.ref(t, name))
	if err != nil {
		t.Fatal(err)
	}
	defer repo.Close()
	index := decode[v1.IndexManifest](t, b.find(indexName).content)
	for _, f := range b.files {
		hex, ok := strings.CutPrefix(f.header.Name, blobPrefix)
		if !ok {
			continue
		}
		d := v1.Descriptor{Digest: v1.Hash{Algorithm: "sha256", Hex: hex}, Size: int64(len(f.content))}
		open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(f.content)), nil }
		if err := repo.Upload(t.Context(), image.Blob{Descriptor: d, Open: open}); err != nil {
			t.Fatal(fmt.Errorf("%s: %w", f.header.Name, err))
		}
	}
	d := index.Manifests[0]
	if err := repo.Put(t.Context(), repo.Reference(), b.find(blobName(d)).content, d.MediaType); err != nil {
		t.Fatal(err)
	}
}
