package image

import (
	"net/http"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// TestSlowRegistryOfAnother: a tenant whose own registry serves the manifest of an image of
// others, and never its layers, keeps nobody else from making that image, or from finding it.
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
		// It has received all of it in the end, whoever was faster.
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
