package image

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
)

// storeOf has n images of one namespace, each with a name there, and as many names of others.
func storeOf(t *testing.T, n int) (s *Store, all []Digest) {
	t.Helper()
	s = newStore(t)
	r := newRights()
	for i := range n {
		d := newDigest(sha256.Sum256(fmt.Append(nil, i)))
		b, err := json.Marshal(Image{Schema: imageSchema, Digest: d})
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(s.rootDir(d), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(s.rootDir(d), metadataName), b, 0o600); err != nil {
			t.Fatal(err)
		}
		r.give("a", d, []Reference{mustRef(t, fmt.Sprintf("registry.example/a/%d:1", i))})
		r.give(fmt.Sprintf("n-%d", i%50), d, []Reference{mustRef(t, fmt.Sprintf("registry.example/b/%d:1", i))})
		all = append(all, d)
	}
	slices.Sort(all)
	if err := s.writeRights(r); err != nil {
		t.Fatal(err)
	}
	return s, all
}

// allocated is how many bytes do allocates.
func allocated(do func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	do()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// TestManyImages: a page of images reads the images on it, and the names of all images once
// instead of once for each image. So do root's list and prune.
func TestManyImages(t *testing.T) {
	const n, page, bound = 2000, 100, 32 << 20
	s, all := storeOf(t, n)
	var list []Visible
	var err error
	bytes := allocated(func() { list, err = s.ListIn("a", string(all[page-1]), page) })
	if err != nil || len(list) != page || list[0].Digest != all[page] || len(list[0].Names) != 1 || list[0].Published {
		t.Fatalf("a page: %d images, %v", len(list), err)
	}
	if bytes > bound {
		t.Errorf("a page of %d images takes %d bytes", page, bytes)
	}
	if rest, err := s.ListIn("a", string(all[n-2]), page); err != nil || len(rest) != 1 || rest[0].Digest != all[n-1] {
		t.Errorf("the last page: %v, %v", rest, err)
	}
	var entries []Entry
	if bytes = allocated(func() { entries, err = s.List() }); err != nil || len(entries) != n || len(entries[0].Namespaces) != 2 || entries[0].Published {
		t.Fatalf("root's list: %d images, %v", len(entries), err)
	}
	if bytes > bound {
		t.Errorf("root's list of %d images takes %d bytes", n, bytes)
	}
	var pruned Pruned
	if bytes = allocated(func() { pruned, err = s.Prune(t.Context(), true) }); err != nil || len(pruned.Images) != n {
		t.Fatalf("pruned %d images, %v", len(pruned.Images), err)
	}
	if bytes > bound {
		t.Errorf("to prune %d images takes %d bytes", n, bytes)
	}
	if r, err := s.readRights(); err != nil || len(r.Images) != 0 || len(r.Namespaces) != 0 {
		t.Errorf("rights are left: %+v, %v", r, err)
	}
	wantTidy(t, s)
}
