package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"agentrun.dev/internal/storage/image/tree"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sync/errgroup"
)

// PullOptions say how an image is pulled. The zero value has good defaults.
type PullOptions struct {
	Platform   Platform
	Registries Registries
	// Limits bound the size of the unpacked image; zero is tree.DefaultLimits.
	Limits tree.Limits
	// Tenant is the namespace to pull for; nil pulls for root, and publishes
	// the image.
	Tenant *Tenant
	// Progress is called with each progress, one call at a time.
	Progress func(Progress)
	// Observe is called when the pull is over.
	Observe func(Pulled)
}

// Pulled is the cost of a pull.
type Pulled struct {
	Took time.Duration
	// Bytes counts the bytes that came from the registry, without manifests.
	Bytes int64
	Err   error
}

func (o PullOptions) limits() tree.Limits {
	if o.Limits == (tree.Limits{}) {
		return tree.DefaultLimits()
	}
	return o.Limits
}

func (o PullOptions) platform() (Platform, error) {
	if o.Platform == (Platform{}) {
		return ParsePlatform("")
	}
	return o.Platform, nil
}

// Pull fetches an image from its registry and names it by its reference, for all namespaces or
// for one. An image that is here already, by digest, is not fetched again. If several
// processes or goroutines pull the same image from the same repository at the same time, one
// of them does the work. A namespace may use an image that is here if it gets the image's
// manifest from a repository that the entire image came from before. Any other repository has
// to send the entire image, which proves the right.
func (s *Store) Pull(ctx context.Context, ref Reference, o PullOptions) (*Image, error) {
	begin, report := time.Now(), NewReporter(o.Progress)
	img, err := s.pull(ctx, ref, o, report)
	if o.Observe != nil {
		o.Observe(Pulled{Took: time.Since(begin), Bytes: report.fetched(), Err: err})
	}
	switch {
	case err == nil:
		return img, nil
	case o.Tenant != nil:
		return nil, fmt.Errorf("pull %s: %w", ref, explainTenant(err, ref))
	}
	return nil, fmt.Errorf("pull %s: %w", ref, explain(err, ref))
}

// Bounds of a pull for a tenant, whose registry may never finish.
const (
	tenantTime  = time.Hour
	resolveTime = 2 * time.Minute
)

func (s *Store) pull(ctx context.Context, ref Reference, o PullOptions, report *Reporter) (_ *Image, err error) {
	report.Phase(Progress{Phase: PhaseResolve})
	platform, err := o.platform()
	if err != nil {
		return nil, err
	}
	r, err := o.Registries.open(ref, o.Tenant, remote.WithPlatform(platform.v1()))
	if err != nil {
		return nil, err
	}
	defer r.Close()
	as := naming{names: []Reference{ref}, repository: r.Name()}
	if o.Tenant != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, tenantTime)
		defer cancel()
		as.namespace = o.Tenant.Namespace
	}
	m, err := r.manifest(ctx, platform, o.Tenant != nil)
	if err != nil {
		return nil, err
	}
	if err := m.fits(o.limits()); err != nil {
		return nil, err
	}
	m.source = ref.String()
	get := getter{
		layers: func(ctx context.Context, w *work, t *tree.Tree) error {
			d := &download{puller: r.puller, repository: r.at.Context(), dir: w.dir, report: report}
			return d.apply(ctx, m, t)
		},
		prove: func(ctx context.Context, w *work) error {
			d := &download{puller: r.puller, repository: r.at.Context(), dir: w.dir, report: report}
			return d.prove(ctx, m)
		},
	}
	return s.make(ctx, m, as, o.limits(), report, get)
}

// manifest asks the registry for the manifest of the reference on a platform.
func (r *Repository) manifest(ctx context.Context, platform Platform, bounded bool) (*manifest, error) {
	if bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, resolveTime)
		defer cancel()
	}
	img, err := resolveRemote(ctx, r.puller, r.at, platform)
	if err != nil {
		return nil, err
	}
	return readManifest(img, platform)
}

// Lookup asks a registry which image a reference leads to. It fetches only the image's
// manifest.
func Lookup(ctx context.Context, ref Reference, o PullOptions) (Digest, error) {
	digest, err := lookup(ctx, ref, o)
	if err != nil {
		return "", fmt.Errorf("look up %s: %w", ref, explain(err, ref))
	}
	return digest, nil
}

func lookup(ctx context.Context, ref Reference, o PullOptions) (Digest, error) {
	platform, err := o.platform()
	if err != nil {
		return "", err
	}
	r, err := o.Registries.open(ref, o.Tenant, remote.WithPlatform(platform.v1()))
	if err != nil {
		return "", err
	}
	defer r.Close()
	img, err := resolveRemote(ctx, r.puller, r.at, platform)
	if err != nil {
		return "", err
	}
	raw, err := img.Digest()
	if err != nil {
		return "", err
	}
	return ParseDigest(raw.String())
}

// resolveRemote asks the registry for the manifest of the platform's image.
func resolveRemote(ctx context.Context, puller *remote.Puller, at name.Reference, platform Platform) (v1.Image, error) {
	desc, err := puller.Get(ctx, at)
	if err != nil {
		return nil, err
	}
	if desc.MediaType.IsSchema1() {
		return nil, errors.New("its manifest is of Docker's first form, which has been withdrawn: push the image again with a current tool")
	}
	if desc.MediaType.IsIndex() {
		if err := hasPlatform(desc, platform); err != nil {
			return nil, err
		}
	}
	return desc.Image()
}

// hasPlatform fails with the list of existing platforms if the wanted one is
// not among them.
func hasPlatform(desc *remote.Descriptor, want Platform) error {
	index, err := desc.ImageIndex()
	if err != nil {
		return err
	}
	m, err := index.IndexManifest()
	if err != nil {
		return err
	}
	_, err = choosePlatform(m.Manifests, want)
	return err
}

// choosePlatform finds the first manifest of an index that satisfies a
// platform.
func choosePlatform(manifests []v1.Descriptor, want Platform) (v1.Descriptor, error) {
	var there []string
	for _, d := range manifests {
		p := v1.Platform{OS: want.OS, Architecture: "amd64"} // the library's assumption
		if d.Platform != nil {
			p = *d.Platform
		}
		if p.Satisfies(want.v1()) {
			return d, nil
		}
		there = append(there, p.String())
	}
	return v1.Descriptor{}, fmt.Errorf("it has no image for %s, only for %s (--platform chooses)", want, strings.Join(there, ", "))
}

// manifest describes an image before its layers have come.
type manifest struct {
	digest   Digest
	platform Platform
	config   *v1.ConfigFile
	layers   []v1.Descriptor
	source   string
}

// Bounds of data that is read into memory.
const (
	maxConfig = 8 << 20
	// maxCommas bounds the number of parts in a configuration. Each takes up to a hundred bytes
	// of memory, however short it is.
	maxCommas = 1 << 18
	maxLayers = 1024
)

// readManifest reads and checks an image's manifest and configuration.
func readManifest(img v1.Image, platform Platform) (*manifest, error) {
	m, err := img.Manifest()
	if err != nil {
		return nil, err
	}
	if m.Config.Size > maxConfig {
		return nil, fmt.Errorf("its configuration has %d bytes, more than %d", m.Config.Size, maxConfig)
	}
	if !m.Config.MediaType.IsConfig() {
		return nil, fmt.Errorf("it is no image of a root filesystem: its configuration is of type %s", m.Config.MediaType)
	}
	if len(m.Layers) > maxLayers {
		return nil, fmt.Errorf("it has %d layers, more than %d", len(m.Layers), maxLayers)
	}
	for i, l := range m.Layers {
		if !slices.Contains(layerTypes, l.MediaType) {
			return nil, fmt.Errorf("layer %d of %d is of type %s, which is no layer of files in its registry", i+1, len(m.Layers), l.MediaType)
		}
		if len(l.URLs) > 0 {
			return nil, fmt.Errorf("layer %d of %d is outside of its registry, at %s: such layers are not fetched", i+1, len(m.Layers), l.URLs[0])
		}
		if l.Size < 0 || l.Digest.Algorithm != "sha256" {
			return nil, fmt.Errorf("layer %d of %d has a size of %d and the digest %s", i+1, len(m.Layers), l.Size, l.Digest)
		}
	}
	raw, err := img.Digest()
	if err != nil {
		return nil, err
	}
	digest, err := ParseDigest(raw.String())
	if err != nil {
		return nil, err
	}
	text, err := img.RawConfigFile()
	if err == nil && bytes.Count(text, []byte(",")) > maxCommas {
		err = fmt.Errorf("it has more than %d parts", maxCommas)
	}
	if err != nil {
		return nil, fmt.Errorf("read its configuration: %w", err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("read its configuration: %w", err)
	}
	out := &manifest{digest: digest, platform: platform, config: config, layers: m.Layers}
	return out, out.validate()
}

func (m *manifest) validate() error {
	if n := len(m.config.RootFS.DiffIDs); n != len(m.layers) {
		return fmt.Errorf("its configuration names %d layers, its manifest %d", n, len(m.layers))
	}
	p := v1.Platform{OS: m.config.OS, Architecture: m.config.Architecture, Variant: m.config.Variant}
	if !p.Satisfies(m.platform.v1()) {
		return fmt.Errorf("it is for %s, not for %s (--platform chooses)", p.String(), m.platform)
	}
	_, err := configOf(m.config.Config)
	return err
}

// fits refuses an image whose layers, as they come from the registry, are larger than
// archives of the largest allowed root filesystem: the layers are stored on the disk before
// they are unpacked.
func (m *manifest) fits(limits tree.Limits) error {
	const entry, end = 4 << 10, 1 << 20 // bytes that archives add to each entry, and at their ends
	most := min(limits.Bytes, 1<<60) + min(int64(limits.Entries), 1<<40)*entry + end
	left := most
	for _, l := range m.layers {
		if left -= l.Size; left < 0 {
			return fmt.Errorf("its layers have more than %d bytes, where all that is in them may have %d", most, limits.Bytes)
		}
	}
	return nil
}

var layerTypes = []types.MediaType{
	types.OCILayer, types.OCILayerZStd, types.OCIUncompressedLayer,
	types.DockerLayer, types.DockerUncompressedLayer,
}

// getter fetches the layers of an image.
type getter struct {
	// layers applies the layers to a tree.
	layers func(context.Context, *work, *tree.Tree) error
	// prove fetches all layers and discards them.
	prove func(context.Context, *work) error
}

// makingKey is the key of the lock that makers of an image take one after the other. Those
// that pull it from different repositories do not wait for each other: a tenant's
// repository may never finish, and the digests of others' images are not secret. The maker
// that finishes first makes the image, and the others have proven their right to it.
func makingKey(d Digest, repository string) string {
	if repository == "" {
		return d.hex()
	}
	sum := sha256.Sum256([]byte(repository))
	return d.hex() + "-" + hex.EncodeToString(sum[:16])
}

// make makes an image of layers, unless it is here or another maker makes it.
func (s *Store) make(ctx context.Context, m *manifest, as naming, limits tree.Limits, report *Reporter, get getter) (_ *Image, err error) {
	lock, err := s.lockMaking(ctx, makingKey(m.digest, as.repository), func() { report.Phase(Progress{Phase: PhaseWait}) })
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	img, err := s.found(ctx, m.digest, as)
	if err == nil {
		report.Phase(Progress{Phase: PhaseDone})
		return img, nil
	}
	w, werr := s.newWork(ctx)
	if werr != nil {
		return nil, werr
	}
	defer func() { err = errors.Join(err, w.close()) }()
	if errors.Is(err, errUnproven) {
		if err := get.prove(ctx, w); err != nil {
			return nil, err
		}
		as.proven = true
		img, err := s.found(ctx, m.digest, as)
		if err == nil {
			report.Phase(Progress{Phase: PhaseDone})
		}
		if !errors.Is(err, ErrNotFound) { // it was removed meanwhile, with another namespace's last name for it
			return img, err
		}
	}
	root := filepath.Join(w.dir, "root")
	//nolint:gosec // all users of the image enter its root; the folder above is ours alone
	if err := os.Mkdir(root, 0o755); err != nil {
		return nil, err
	}
	t, err := tree.New(root, limits)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	if err := get.layers(ctx, w, t); err != nil {
		return nil, err
	}
	config, err := configOf(m.config.Config)
	if err != nil {
		return nil, err
	}
	if config.WorkingDir != "" {
		if err := t.MakeFolder(config.WorkingDir); err != nil {
			return nil, err
		}
	}
	facts, err := t.Finish()
	if err != nil {
		return nil, err
	}
	report.Phase(Progress{Phase: PhasePack})
	img = &Image{
		Digest: m.digest, Platform: m.platform.String(), Source: m.source, Created: m.config.Created.Time, Config: config,
		Unpacked: facts.Bytes, Capabilities: facts.Capabilities, DroppedXattrs: facts.DroppedXattrs,
	}
	if err := s.packRoot(ctx, w, root, img, len(facts.WithXattrs) > 0); err != nil {
		return nil, err
	}
	if err := s.commit(ctx, w, img, as); err != nil {
		return nil, err
	}
	report.Phase(Progress{Phase: PhaseDone})
	return img, nil
}

// packRoot packs a root filesystem into the image's future folder.
func (s *Store) packRoot(ctx context.Context, w *work, root string, img *Image, xattrs bool) error {
	made := filepath.Join(w.dir, "image")
	if err := os.Mkdir(made, 0o700); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	packOne := func(name string, with bool, f *File) {
		g.Go(func() (err error) {
			path := filepath.Join(made, name)
			if err := pack(ctx, root, path, with); err != nil {
				return err
			}
			*f, err = describeFile(path)
			return err
		})
	}
	packOne(rootName, true, &img.Root)
	if xattrs {
		img.Plain = &File{}
		packOne(plainName, false, img.Plain)
	}
	return g.Wait()
}
