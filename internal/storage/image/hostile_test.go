package image

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"
)

// TestSlowRegistryOfAnother: if a tenant's own registry serves the manifest of another
// tenant's image, but never its layers, other makers can still make that image and find it.
func TestSlowRegistryOfAnother(t *testing.T) {
	for _, here := range []bool{false, true} {
		s, good, evil := newStore(t), newRegistry(t, plainHTTP), newRegistry(t, plainHTTP)
		img := small(t, "of others")
		ref, leaked := good.push(t, "others/app", img), evil.push(t, "evil/app", img)
		layers, err := img.Layers()
		if err != nil {
			t.Fatal(err)
		}
		layer, err := layers[0].Digest()
		if err != nil {
			t.Fatal(err)
		}
		asked, free := make(chan struct{}, 8), make(chan struct{})
		evil.set(func(_ http.ResponseWriter, r *http.Request) bool {
			if strings.HasSuffix(r.URL.Path, layer.String()) {
				asked <- struct{}{}
				<-free
			}
			return false
		})
		if here {
			if _, err := s.Pull(t.Context(), ref, good.tenant(t, "first", "")); err != nil {
				t.Fatal(err)
			}
		}
		o, ended := evil.tenant(t, "evil", ""), make(chan error, 1)
		go func() {
			_, err := s.Pull(t.Context(), leaked, o)
			ended <- err
		}()
		<-asked
		waits := good.tenant(t, "others", "")
		waits.Progress = func(p Progress) {
			if p.Phase == PhaseWait {
				t.Errorf("here %v: a pull waits for the registry of another tenant", here)
				free <- struct{}{}
			}
		}
		if _, err := s.Pull(t.Context(), ref, waits); err != nil {
			t.Errorf("here %v: %v", here, err)
		}
		wantNotHere(t, s, "evil", string(digestOf(t, img)))
		close(free)
		// It has received the entire image in the end, whichever maker was
		// faster.
		if err := <-ended; err != nil {
			t.Errorf("here %v: the slow one: %v", here, err)
		}
		for _, n := range []string{"evil", "others"} {
			if _, err := s.ResolveIn(n, string(digestOf(t, img))); err != nil {
				t.Errorf("here %v: namespace %s: %v", here, n, err)
			}
		}
	}
}

// TestDigestIsCompared: a registry gives no other content for a digest by calling it a signed
// manifest of Docker's first form, whose digest a library takes from a header.
func TestDigestIsCompared(t *testing.T) {
	r, s := newRegistry(t, plainHTTP), newStore(t)
	wanted, other := small(t, "wanted"), small(t, "other")
	index := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex), mutate.IndexAddendum{
		Add: wanted, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "amd64"}},
	})
	r.push(t, "app:1", index)
	r.push(t, "app:other", other)
	of, err := index.Digest()
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := other.RawManifest()
	if err != nil {
		t.Fatal(err)
	}
	r.set(func(w http.ResponseWriter, req *http.Request) bool {
		digest := string(digestOf(t, wanted))
		if !strings.HasSuffix(req.URL.Path, "/manifests/"+digest) {
			return false
		}
		w.Header().Set("Content-Type", string(types.DockerManifestSchema1Signed))
		w.Header().Set("Docker-Content-Digest", digest)
		_, _ = w.Write(manifest)
		return true
	})
	ref := mustRef(t, r.host+"/app@"+of.String())
	for what, o := range map[string]PullOptions{"root": r.options(t), "a tenant": r.tenant(t, "a", "")} {
		if img, err := s.Pull(t.Context(), ref, o); err == nil {
			t.Errorf("%s got %s for the index %s of %s", what, img.Digest, of, digestOf(t, wanted))
		}
		if got, err := Lookup(t.Context(), ref, o); err == nil {
			t.Errorf("%s finds %s for the index %s of %s", what, got, of, digestOf(t, wanted))
		}
	}
	repo, err := r.options(t).Registries.Open(mustRef(t, r.host+"/app@"+string(digestOf(t, wanted))))
	if err != nil {
		t.Fatal(err)
	}
	defer repo.Close()
	if raw, desc, err := repo.Get(t.Context(), repo.Reference()); err == nil {
		t.Errorf("digest %s gives %s", desc.Digest, raw)
	}
}

// TestBrokenLayer: a registry that breaks connections in the middle of its answers has a tenant
// told none of the addresses of the node.
func TestBrokenLayer(t *testing.T) {
	r, s := newRegistry(t, plainHTTP), newStore(t)
	ref := r.push(t, "team/app:1", small(t, "one"))
	for _, path := range []string{"/manifests/", "/blobs/"} {
		r.set(func(w http.ResponseWriter, req *http.Request) bool {
			if req.Method != http.MethodGet || !strings.Contains(req.URL.Path, path) {
				return false
			}
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return true
			}
			_, err = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Type: application/vnd.oci.image.manifest.v1+json\r\nContent-Length: 1000\r\n\r\n{")
			if tcp, ok := conn.(*net.TCPConn); ok {
				err = errors.Join(err, tcp.SetLinger(0)) // it is reset
			}
			if err := errors.Join(err, conn.Close()); err != nil {
				t.Error(err)
			}
			return true
		})
		o := r.tenant(t, "a", "")
		_, err := s.Pull(t.Context(), ref, o)
		if err == nil || strings.Contains(strings.ReplaceAll(err.Error(), r.host, ""), "127.0.0.1") {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// TestHugeLayers: an image whose layers are larger than archives of the largest allowed root
// filesystem is refused before any layer is fetched: they would be stored on the disk before
// they are unpacked.
func TestHugeLayers(t *testing.T) {
	r, s := newRegistry(t, plainHTTP), newStore(t)
	img := small(t, "one")
	raw, err := img.RawManifest()
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.RawConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []int64{1 << 40, math.MaxInt64} {
		var m v1.Manifest
		if err := json.Unmarshal(raw, &m); err != nil {
			t.Fatal(err)
		}
		m.Layers[0].Size = size
		hostile, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		r.set(func(w http.ResponseWriter, req *http.Request) bool {
			switch {
			case strings.Contains(req.URL.Path, "/manifests/"):
				w.Header().Set("Content-Type", string(m.MediaType))
				_, _ = w.Write(hostile)
			case strings.HasSuffix(req.URL.Path, m.Config.Digest.String()):
				_, _ = w.Write(config)
			case strings.Contains(req.URL.Path, "/blobs/"):
				t.Errorf("a layer is fetched: %s", req.URL.Path)
				w.WriteHeader(http.StatusNotFound)
			default:
				return false
			}
			return true
		})
		if _, err := s.Pull(t.Context(), mustRef(t, r.host+"/app:1"), r.tenant(t, "a", "")); err == nil || !strings.Contains(err.Error(), "its layers have more than") {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
}

// TestManyManifests: an index, or a manifest, takes so much memory at most, whatever is in it.
func TestManyManifests(t *testing.T) {
	r := newRegistry(t, plainHTTP)
	const most = 512 << 20
	for mediaType, field := range map[types.MediaType]string{types.OCIImageIndex: "manifests", types.OCIManifestSchema1: "layers"} {
		hostile := fmt.Sprintf(`{"schemaVersion":2,"mediaType":%q,%q:[%s{}]}`, mediaType, field, strings.Repeat("{},", 7<<20/3))
		r.set(func(w http.ResponseWriter, req *http.Request) bool {
			switch {
			case strings.Contains(req.URL.Path, "/manifests/"): // elsewhere it is no smaller
				http.Redirect(w, req, "/elsewhere", http.StatusTemporaryRedirect)
			case strings.Contains(req.URL.Path, "/elsewhere"):
				w.Header().Set("Content-Type", string(mediaType))
				_, _ = io.WriteString(w, hostile)
			default:
				return false
			}
			return true
		})
		o, ref := r.tenant(t, "a", ""), mustRef(t, r.host+"/app:1")
		var err error
		bytes := allocated(func() { _, err = Lookup(t.Context(), ref, o) })
		if err == nil || bytes > most {
			t.Errorf("%s: %d bytes were allocated, %.200v", mediaType, bytes, err)
		}
	}
}

// TestRemovedWhileProven: an image that goes with the last name of another namespace, while one
// proves that it may use it, is made anew.
func TestRemovedWhileProven(t *testing.T) {
	s, first, second := newStore(t), newRegistry(t, plainHTTP), newRegistry(t, plainHTTP)
	img := small(t, "of both")
	ref, again := first.push(t, "app", img), second.push(t, "app", img)
	if _, err := s.Pull(t.Context(), ref, first.tenant(t, "a", "")); err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigName()
	if err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	second.set(func(_ http.ResponseWriter, req *http.Request) bool {
		if strings.Contains(req.URL.Path, "/blobs/") && !strings.HasSuffix(req.URL.Path, config.String()) {
			once.Do(func() {
				if err := s.RemoveIn(t.Context(), "a", ref.String()); err != nil {
					t.Error(err)
				}
			})
		}
		return false
	})
	if _, err := s.Pull(t.Context(), again, second.tenant(t, "b", "")); err != nil {
		t.Fatal(err)
	}
	wantContent(t, s, digestOf(t, img), map[string]string{"file": "of both"})
	wantNotHere(t, s, "a", string(digestOf(t, img)))
	if _, err := s.ResolveIn("b", again.String()); err != nil {
		t.Error(err)
	}
	wantTidy(t, s)
}

// TestUnpublishInTwoSteps: an image is not left published without a name where the second of two
// files cannot be written: its name is there, to be taken away again.
func TestUnpublishInTwoSteps(t *testing.T) {
	s, r := newStore(t), newRegistry(t, plainHTTP)
	img := small(t, "of all")
	ref := r.push(t, "app:1", img)
	if _, err := s.Pull(t.Context(), ref, r.options(t)); err != nil {
		t.Fatal(err)
	}
	// No file is renamed to where something is mounted.
	for _, file := range []string{namesName, rightsName} {
		if err := unix.Mount(s.path(file), s.path(file), "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		_, err := s.Unpublish(t.Context(), ref.String())
		if unmounted := unix.Unmount(s.path(file), 0); err == nil || unmounted != nil {
			t.Errorf("%s: %v, %v", file, err, unmounted)
		}
		if _, err := s.ResolveIn("a", ref.String()); err != nil {
			t.Errorf("the name is gone where %s was not written: %v", file, err)
		}
	}
	if _, err := s.Unpublish(t.Context(), ref.String()); err != nil {
		t.Error(err)
	}
	wantNotHere(t, s, "a", ref.String(), string(digestOf(t, img)))
}

// TestManyPartsOfConfig: a configuration takes so much memory at most, whatever is in it.
func TestManyPartsOfConfig(t *testing.T) {
	r := newRegistry(t, plainHTTP)
	config := `{"os":"linux","architecture":"amd64","history":[` + strings.Repeat("{},", 7<<20/3) + `{}]}`
	digest := newDigest(sha256.Sum256([]byte(config)))
	manifest := fmt.Sprintf(`{"schemaVersion":2,"mediaType":%q,"config":{"mediaType":%q,"digest":%q,"size":%d},"layers":[]}`,
		types.OCIManifestSchema1, types.OCIConfigJSON, digest, len(config))
	r.set(func(w http.ResponseWriter, req *http.Request) bool {
		switch {
		case strings.Contains(req.URL.Path, "/manifests/"):
			w.Header().Set("Content-Type", string(types.OCIManifestSchema1))
			_, _ = io.WriteString(w, manifest)
		case strings.Contains(req.URL.Path, "/blobs/"):
			_, _ = io.WriteString(w, config)
		default:
			return false
		}
		return true
	})
	s, o, ref := newStore(t), r.tenant(t, "a", ""), mustRef(t, r.host+"/app:1")
	var err error
	bytes := allocated(func() { _, err = s.Pull(t.Context(), ref, o) })
	if err == nil || bytes > 128<<20 {
		t.Errorf("%d bytes were allocated, %.200v", bytes, err)
	}
}
