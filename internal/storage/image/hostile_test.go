package image

import (
	"net/http"
	"strings"
	"testing"
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
