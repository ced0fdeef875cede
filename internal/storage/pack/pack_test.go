package pack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/storage/image"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"golang.org/x/sys/unix"
)

// TestRoundTrip: a snapshot of either engine is the same after packing and
// unpacking, by file and by registry. The same snapshot gives the same pack.
func TestRoundTrip(t *testing.T) {
	for name, edit := range map[string]func(*snapshot.Manifest){"microvm": func(*snapshot.Manifest) {}, "gvisor": onGVisor} {
		t.Run(name, func(t *testing.T) {
			snap := makeSnapshot(t, content{size: PartSize + 20*page, pages: []uint64{1, 5000, PartSize / page}}, content{size: 4 * page, pages: []uint64{0}}, edit)
			b := packed(t, snap, PackOptions{})
			if again := packed(t, snap, PackOptions{}); !bytes.Equal(b, again) {
				t.Error("the same snapshot gives another pack")
			}
			got, _, err := unpackInto(t, b, UnpackOptions{})
			if err != nil {
				t.Fatal(err)
			}
			wantSame(t, got, snap)
			r := newRegistry(t)
			digest := r.push(t, "team/base:1", snap, PackOptions{})
			for _, ref := range []string{"team/base:1", "team/base@" + digest.String()} {
				pulled, _, err := r.pull(t, ref, UnpackOptions{})
				if err != nil {
					t.Fatal(err)
				}
				wantSame(t, pulled, snap)
			}
		})
	}
}

// TestZeros: zeros take no space, neither in a pack nor unpacked.
func TestZeros(t *testing.T) {
	const size = 256 << 20
	snap := makeSnapshot(t, content{size: size, pages: []uint64{7, size/page - 1}}, content{size: 4 * page, pages: []uint64{0}})
	b := packed(t, snap, PackOptions{})
	if len(b) > 64<<10 {
		t.Errorf("three pages became %d bytes", len(b))
	}
	got, parent, err := unpackInto(t, b, UnpackOptions{})
	if err != nil {
		t.Fatal(err)
	}
	wantSame(t, got, snap)
	memory := snap.Manifest().Memory.Layers[0].Digest.String()
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(parent, "snapshot", "layers", memory), &st); err != nil {
		t.Fatal(err)
	}
	if st.Size != size || st.Blocks*512 > 1<<20 {
		t.Errorf("it has %d bytes in %d on disk", st.Size, st.Blocks*512)
	}
	parts := 0
	for _, f := range open(t, b).files {
		if strings.HasPrefix(f.header.Name, blobPrefix) {
			parts++
		}
	}
	if parts != 6 { // state, two of eight ranges, disk, config, manifest
		t.Errorf("%d blobs", parts)
	}
}

// TestSharedParts: blobs that the registry has are not sent again, and layers
// that the host has are not fetched again.
func TestSharedParts(t *testing.T) {
	base := content{size: 8 * page, pages: []uint64{0, 1}, seed: 3}
	first := makeSnapshot(t, content{size: 4 * page, pages: []uint64{1}, seed: 1}, base)
	second := makeSnapshot(t, content{size: 4 * page, pages: []uint64{1}, seed: 2}, base)
	r := newRegistry(t)
	r.push(t, "team/base:1", first, PackOptions{})
	if n := r.count("PATCH blob"); n != 4 { // state, memory, disk, config
		t.Errorf("%d blobs were sent", n)
	}
	r.push(t, "team/base:2", second, PackOptions{})
	if n := r.count("PATCH blob"); n != 2 { // memory, config
		t.Errorf("%d blobs of the second were sent", n)
	}
	r.push(t, "team/base:3", second, PackOptions{})
	if n := r.count("PATCH blob"); n != 0 {
		t.Errorf("%d blobs of the same were sent", n)
	}
	_, parent, err := r.pull(t, "team/base:1", UnpackOptions{})
	if err != nil {
		t.Fatal(err)
	}
	r.count("GET blob")
	lend := func(ref layer.Ref) *snapshot.Snapshot {
		if ref.Digest != first.Manifest().Disks[0].Stack.Layers[0].Digest {
			return nil
		}
		s, err := snapshot.Open(filepath.Join(parent, "snapshot"))
		if err != nil {
			t.Error(err)
			return nil
		}
		return s
	}
	two, _, err := r.pull(t, "team/base:2", UnpackOptions{Lend: lend})
	if err != nil {
		t.Fatal(err)
	}
	wantSame(t, two, second)
	if n := r.count("GET blob"); n != 3 { // config, state, memory
		t.Errorf("%d blobs were fetched", n)
	}
	// A lender whose copy is damaged is skipped.
	shared := filepath.Join(parent, "snapshot", "layers", second.Manifest().Disks[0].Stack.Layers[0].Digest.String())
	if err := errors.Join(os.Remove(shared), os.WriteFile(shared, make([]byte, 8*page), 0o400)); err != nil {
		t.Fatal(err)
	}
	three, _, err := r.pull(t, "team/base:2", UnpackOptions{Lend: lend})
	if err != nil {
		t.Fatal(err)
	}
	wantSame(t, three, second)
}

// TestAccept: a snapshot that the host refuses is refused before its content is
// fetched.
func TestAccept(t *testing.T) {
	r := newRegistry(t)
	r.push(t, "team/base:1", small(t), PackOptions{})
	r.count("GET blob")
	no := errors.New("another processor")
	_, parent, err := r.pull(t, "team/base:1", UnpackOptions{Accept: func(m snapshot.Manifest) error {
		if m.CPU.Family != 23 {
			t.Errorf("asked about %+v", m.CPU)
		}
		return no
	}})
	wantRefused(t, parent, err, "another processor")
	if n := r.count("GET blob"); n != 1 {
		t.Errorf("%d blobs were fetched, the configuration alone is needed", n)
	}
}

// TestNotASnapshot: other artifacts in a registry are refused, and the error
// names their kind.
func TestNotASnapshot(t *testing.T) {
	r := newRegistry(t)
	repo, err := r.registries().Open(r.ref(t, "app:1"))
	if err != nil {
		t.Fatal(err)
	}
	defer repo.Close()
	if err := repo.PutImage(t.Context(), repo.Reference(), empty.Image); err != nil {
		t.Fatal(err)
	}
	_, parent, err := r.pull(t, "app:1", UnpackOptions{})
	wantRefused(t, parent, err, "it is an image, not a snapshot")
	_, parent, err = r.pull(t, "app:2", UnpackOptions{})
	wantRefused(t, parent, err, "no such")
	raw := encode(t, v1.IndexManifest{SchemaVersion: 2, MediaType: "application/vnd.oci.image.index.v1+json", Manifests: []v1.Descriptor{}})
	if err := repo.Put(t.Context(), repo.Tag("many"), raw, "application/vnd.oci.image.index.v1+json"); err != nil {
		t.Fatal(err)
	}
	_, parent, err = r.pull(t, "app:many", UnpackOptions{})
	wantRefused(t, parent, err, "several platforms")
	_, err = Push(t.Context(), small(t), r.ref(t, "app@sha256:"+strings.Repeat("0", 64)), r.registries(), PackOptions{})
	if err == nil || !strings.Contains(err.Error(), "name a tag") {
		t.Errorf("push to a digest: %v", err)
	}
}

// TestOtherContent: a registry that serves other content is noticed.
func TestOtherContent(t *testing.T) {
	r := newRegistry(t)
	snap := small(t)
	r.push(t, "team/base:1", snap, PackOptions{})
	config := snap.ID().String()
	for name, blob := range map[string]bool{"configuration": true, "part": false} {
		r.set(func(w http.ResponseWriter, req *http.Request) bool {
			if req.Method != http.MethodGet || !strings.Contains(req.URL.Path, "/blobs/") || strings.Contains(req.URL.Path, config) != blob {
				return false
			}
			_, _ = w.Write(make([]byte, 1<<20)) // more than there should be; the test fails if this goes unnoticed
			return true
		})
		_, parent, err := r.pull(t, "team/base:1", UnpackOptions{})
		t.Log(name)
		wantRefused(t, parent, err, "pull snapshot")
	}
}

// TestDamagedSource: a damaged snapshot is not packed.
func TestDamagedSource(t *testing.T) {
	snap := small(t)
	f, err := snap.OpenLayer(layer.Ref(snap.Manifest().Memory.Layers[0]))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := os.Chmod(f.Name(), 0o600); err != nil {
		t.Fatal(err)
	}
	w, err := os.OpenFile(f.Name(), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteAt([]byte("x"), 100); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Write(t.Context(), &bytes.Buffer{}, snap, PackOptions{}); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("packed: %v", err)
	}
}

// TestStopped: a cancelled unpacking leaves no files.
func TestStopped(t *testing.T) {
	b := packed(t, small(t), PackOptions{})
	ctx, cancel := context.WithCancel(t.Context())
	parent := t.TempDir()
	_, err := Read(ctx, bytes.NewReader(b), int64(len(b)), filepath.Join(parent, "snapshot"), UnpackOptions{Progress: func(p image.Progress) {
		if p.Phase == image.PhaseUnpack {
			cancel()
		}
	}})
	wantRefused(t, parent, err, "context canceled")
	if _, err := Write(ctx, &bytes.Buffer{}, small(t), PackOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("packed: %v", err)
	}
}

// TestProgress: phases come in order, and the bytes add up.
func TestProgress(t *testing.T) {
	r := newRegistry(t)
	snap := small(t)
	watch := func(do func(func(image.Progress))) (phases []image.Phase) {
		var last image.Progress
		do(func(p image.Progress) {
			if len(phases) == 0 || phases[len(phases)-1] != p.Phase {
				if last.Done != last.Total {
					t.Errorf("%s ended with %d of %d bytes", last.Phase, last.Done, last.Total)
				}
				phases = append(phases, p.Phase)
			}
			last = p
		})
		return phases
	}
	for want, do := range map[string]func(func(image.Progress)){
		"[resolve download done]": func(f func(image.Progress)) {
			r.push(t, "a:1", snap, PackOptions{})
			if _, _, err := r.pull(t, "a:1", UnpackOptions{Progress: f}); err != nil {
				t.Error(err)
			}
		},
		"[unpack done]": func(f func(image.Progress)) {
			if _, _, err := unpackInto(t, packed(t, snap, PackOptions{}), UnpackOptions{Progress: f}); err != nil {
				t.Error(err)
			}
		},
		"[verify pack done]":   func(f func(image.Progress)) { packed(t, snap, PackOptions{Progress: f}) },
		"[verify upload done]": func(f func(image.Progress)) { r.push(t, "a:1", snap, PackOptions{Progress: f}) },
	} {
		if got := watch(do); want != fmt.Sprint(got) {
			t.Errorf("%v, want %s", got, want)
		}
	}
}
