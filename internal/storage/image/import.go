package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"agentrun.dev/internal/storage/image/tree"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// ImportOptions say how images are imported.
type ImportOptions struct {
	Platform Platform
	// Name is a name for the image, if there is exactly one.
	Name     *Reference
	Limits   tree.Limits
	Progress func(Progress)
}

// importable is an image in an archive or folder, with a function that opens
// its layers.
type importable struct {
	manifest *manifest
	names    []Reference
	open     func(layer int) (io.ReadCloser, error)
}

// Import imports images from an OCI layout, as a folder or in a tar archive, or
// from the output of docker save, compressed or not.
func (s *Store) Import(ctx context.Context, path string, o ImportOptions) ([]*Image, error) {
	imgs, err := s.importFrom(ctx, path, o)
	if err != nil {
		return nil, fmt.Errorf("import %s: %w", path, err)
	}
	return imgs, nil
}

func (s *Store) importFrom(ctx context.Context, path string, o ImportOptions) (_ []*Image, err error) {
	limits := PullOptions{Limits: o.Limits}.limits()
	platform, err := PullOptions{Platform: o.Platform}.platform()
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	dir := path
	if !info.IsDir() {
		w, err := s.newWork(ctx)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, w.close()) }()
		dir = filepath.Join(w.dir, "archive")
		if err := unpackArchive(ctx, path, dir, limits); err != nil {
			return nil, err
		}
	}
	found, err := findImages(dir, platform)
	if err != nil {
		return nil, err
	}
	if o.Name != nil {
		if len(found) != 1 {
			return nil, fmt.Errorf("it holds %d images, and one name was given for them: leave it out, they have their own", len(found))
		}
		found[0].names = []Reference{*o.Name}
	}
	var out []*Image
	for _, i := range found {
		i.manifest.source = filepath.Base(path)
		report := NewReporter(o.Progress)
		img, err := s.make(ctx, i.manifest, naming{names: i.names}, limits, report, getter{layers: func(ctx context.Context, _ *work, t *tree.Tree) error {
			return i.apply(ctx, t, report)
		}})
		if err != nil {
			return out, err
		}
		out = append(out, img)
	}
	return out, nil
}

// unpackArchive unpacks an archive of images. It is as hostile as a layer, and
// may hold files and folders only.
func unpackArchive(ctx context.Context, path, dir string, limits tree.Limits) (err error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	limits.Devices = 0
	t, err := tree.New(dir, limits)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = t.Apply(ctx, f)
	return err
}

func (i *importable) apply(ctx context.Context, t *tree.Tree, report *Reporter) error {
	for n := range i.manifest.config.RootFS.DiffIDs {
		report.Phase(Progress{Phase: PhaseUnpack, Layer: n + 1, Layers: len(i.manifest.layers)})
		if err := i.applyLayer(ctx, t, n); err != nil {
			return fmt.Errorf("layer %d of %d: %w", n+1, len(i.manifest.layers), err)
		}
	}
	return nil
}

func (i *importable) applyLayer(ctx context.Context, t *tree.Tree, n int) error {
	r, err := i.open(n)
	if err != nil {
		return err
	}
	defer r.Close()
	hash := sha256.New()
	if err := applyLayer(ctx, t, io.TeeReader(r, hash), i.manifest.config.RootFS.DiffIDs[n]); err != nil {
		return err
	}
	want := i.manifest.layers[n].Digest
	if got := newDigest([sha256.Size]byte(hash.Sum(nil))); want != (v1.Hash{}) && string(got) != want.String() {
		return fmt.Errorf("it has digest %s, the manifest says %s", got, want)
	}
	return nil
}

// findImages tells the two forms apart. Since version 25 docker save writes
// both; the OCI layout has more information.
func findImages(dir string, platform Platform) (found []*importable, err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	if _, err := root.Lstat("index.json"); err == nil {
		return layoutImages(dir, platform)
	}
	manifests, err := readBounded(root, "manifest.json")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errors.New("it holds neither index.json (an OCI layout) nor manifest.json (docker save)")
	}
	if err != nil {
		return nil, err
	}
	var list tarball.Manifest
	if err := json.Unmarshal(manifests, &list); err != nil {
		return nil, fmt.Errorf("manifest.json: %w", err)
	}
	for _, d := range list {
		i, err := savedImage(root, dir, d, platform)
		if err != nil {
			return nil, err
		}
		found = append(found, i)
	}
	if len(found) == 0 {
		return nil, errors.New("manifest.json names no image")
	}
	return found, nil
}

func readBounded(root *os.Root, name string) ([]byte, error) {
	info, err := root.Stat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxConfig {
		return nil, fmt.Errorf("%s is no file of at most %d bytes", name, maxConfig)
	}
	return root.ReadFile(name)
}

// savedImage is an image of docker save: its layers have names, its manifest
// has no digest.
func savedImage(root *os.Root, dir string, d tarball.Descriptor, platform Platform) (*importable, error) {
	raw, err := readBounded(root, d.Config)
	if err != nil {
		return nil, fmt.Errorf("configuration of image: %w", err)
	}
	m := &manifest{digest: newDigest(sha256.Sum256(raw)), platform: platform, config: &v1.ConfigFile{}}
	if err := json.Unmarshal(raw, m.config); err != nil {
		return nil, fmt.Errorf("configuration of image: %w", err)
	}
	if len(d.Layers) > maxLayers {
		return nil, fmt.Errorf("it has %d layers, more than %d", len(d.Layers), maxLayers)
	}
	m.layers = make([]v1.Descriptor, len(d.Layers)) // their digests are the configuration's
	i := &importable{manifest: m, open: func(n int) (io.ReadCloser, error) {
		root, err := os.OpenRoot(dir)
		if err != nil {
			return nil, err
		}
		defer root.Close()
		return openRegular(root, d.Layers[n])
	}}
	if i.names, err = parseNames(d.RepoTags); err != nil {
		return nil, err
	}
	return i, m.validate()
}

// openRegular opens a regular file only: a FIFO would never answer.
func openRegular(root *os.Root, name string) (*os.File, error) {
	info, err := root.Stat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is no file", name)
	}
	return root.Open(name)
}

func parseNames(texts []string) (out []Reference, err error) {
	for _, t := range texts {
		ref, err := ParseReference(t)
		if err != nil {
			return nil, err
		}
		out = append(out, ref)
	}
	return out, nil
}

// Annotations that name an image in a layout. containerd and docker write the
// first; the second is often a tag alone.
const (
	annotationContainerd = "io.containerd.image.name"
	annotationRefName    = "org.opencontainers.image.ref.name"
)

// layoutImages finds the images of an OCI layout, one for each entry of its
// index.
func layoutImages(dir string, platform Platform) (out []*importable, err error) {
	if err := checkBlobs(dir); err != nil {
		return nil, err
	}
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, fmt.Errorf("index.json: %w", err)
	}
	m, err := index.IndexManifest()
	if err != nil {
		return nil, fmt.Errorf("index.json: %w", err)
	}
	for _, d := range m.Manifests {
		i, err := layoutImage(dir, index, d, platform, 0)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", d.Digest, err)
		}
		text := d.Annotations[annotationContainerd]
		if text == "" {
			text = d.Annotations[annotationRefName]
		}
		// A tag alone names no image: the image is then known by its digest, or
		// by the name that the caller gave.
		if ref, err := ParseReference(text); err == nil && strings.ContainsAny(text, "/:@") {
			i.names = []Reference{ref}
		}
		out = append(out, i)
	}
	if len(out) == 0 {
		return nil, errors.New("index.json names no image")
	}
	return out, nil
}

// maxNesting bounds the depth of nested indexes.
const maxNesting = 4

func layoutImage(dir string, index v1.ImageIndex, d v1.Descriptor, platform Platform, depth int) (*importable, error) {
	if d.MediaType.IsIndex() {
		if depth == maxNesting {
			return nil, fmt.Errorf("indexes are nested more than %d deep", maxNesting)
		}
		inner, err := index.ImageIndex(d.Digest)
		if err != nil {
			return nil, err
		}
		m, err := inner.IndexManifest()
		if err != nil {
			return nil, err
		}
		chosen, err := choosePlatform(m.Manifests, platform)
		if err != nil {
			return nil, err
		}
		return layoutImage(dir, inner, chosen, platform, depth+1)
	}
	if d.Size > maxConfig {
		return nil, fmt.Errorf("its manifest has %d bytes, more than %d", d.Size, maxConfig)
	}
	img, err := index.Image(d.Digest)
	if err != nil {
		return nil, err
	}
	m, err := readManifest(img, platform)
	if err != nil {
		return nil, err
	}
	if string(m.digest) != d.Digest.String() {
		return nil, fmt.Errorf("its manifest has digest %s", m.digest)
	}
	return &importable{manifest: m, open: func(n int) (io.ReadCloser, error) {
		root, err := os.OpenRoot(dir)
		if err != nil {
			return nil, err
		}
		defer root.Close() // an open file stays open
		h := m.layers[n].Digest
		return openRegular(root, filepath.Join("blobs", h.Algorithm, h.Hex))
	}}, nil
}

// checkBlobs ensures that each blob that the library reads as a whole, by path,
// is a regular file with the digest in its name. Blobs larger than maxConfig
// can only be layers.
func checkBlobs(dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	if _, err := readBounded(root, "index.json"); err != nil {
		return err
	}
	blobs := filepath.Join("blobs", "sha256")
	entries, err := fs.ReadDir(root.FS(), blobs)
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return err
		}
		if !info.Mode().IsRegular() {
			return fmt.Errorf("blob %s is no file", e.Name())
		}
		if info.Size() > maxConfig {
			continue // a layer: checked when it is read
		}
		b, err := root.ReadFile(filepath.Join(blobs, e.Name()))
		if err != nil {
			return err
		}
		if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != e.Name() {
			return fmt.Errorf("blob %s has digest %s", e.Name(), newDigest(sum))
		}
	}
	return nil
}
