package image

import (
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// TestPullObserved: the observer is told how many bytes each pull fetched,
// which is 0 if all of the image is here, and how it failed.
func TestPullObserved(t *testing.T) {
	r, s := newRegistry(t, withTLS), newStore(t)
	layer := layerOf(t, tarOf(t, map[string]string{"bin/": "", "bin/tool": "one"}))
	size, err := layer.Size()
	if err != nil {
		t.Fatal(err)
	}
	ref := r.push(t, "team/app:v1", imageOf(t, v1.Config{}, layer))
	var seen []Pulled
	o := r.options(t)
	o.Observe = func(p Pulled) { seen = append(seen, p) }
	for range 2 {
		if _, err := s.Pull(t.Context(), ref, o); err != nil {
			t.Fatal(err)
		}
	}
	missing, err := ParseReference(ref.String() + "-missing")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Pull(t.Context(), missing, o); err == nil {
		t.Fatal("pulled what is not there")
	}
	if len(seen) != 3 || seen[0].Bytes != size || seen[0].Took <= 0 || seen[0].Err != nil || seen[1].Bytes != 0 || seen[2].Err == nil {
		t.Errorf("a layer of %d bytes: %+v", size, seen)
	}
}
