package pack

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"agentrun.dev/internal/storage/image"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Names in a file, which is a tar archive of an OCI image layout.
const (
	layoutName = "oci-layout"
	indexName  = "index.json"
	blobPrefix = "blobs/sha256/"

	layoutFile = `{"imageLayoutVersion":"1.0.0"}`
	maxLayout  = 1 << 10
	maxIndex   = 1 << 20
	// maxEntries are the parts, and a few entries that every file has.
	maxEntries = maxParts + 256
)

// kindKey and its values distinguish signatures from the manifest that they
// sign, as cosign save does.
const (
	kindKey        = "kind"
	imageKind      = "dev.cosignproject.cosign/image"
	signaturesKind = "dev.cosignproject.cosign/sigs"
)

// PackOptions say how a snapshot is packed. The zero value is valid.
type PackOptions struct {
	// Key signs the pack; nil leaves it unsigned.
	Key *Signer
	// Progress is called whenever there is progress, never concurrently.
	Progress func(image.Progress)
}

// Write packs a snapshot into one file. It returns the digest of the pack's
// manifest, which identifies all of the pack.
func Write(ctx context.Context, w io.Writer, snap *snapshot.Snapshot, o PackOptions) (v1.Hash, error) {
	digest, err := write(ctx, w, snap, o)
	if err != nil {
		return v1.Hash{}, fmt.Errorf("pack snapshot %s: %w", snap.ID(), err)
	}
	return digest, nil
}

func write(ctx context.Context, w io.Writer, snap *snapshot.Snapshot, o PackOptions) (digest v1.Hash, err error) {
	report := image.NewReporter(o.Progress)
	if err := prepare(ctx, snap, report); err != nil {
		return digest, err
	}
	out := &archive{tar: tar.NewWriter(w), time: snap.Manifest().Created, has: map[v1.Hash]bool{}}
	if err := out.file(layoutName, []byte(layoutFile)); err != nil {
		return digest, err
	}
	report.Phase(image.Progress{Phase: image.PhasePack, Total: total(snap)})
	a := artifact{}
	a.parts, err = cut(ctx, snap, report, inOrder, func(_ context.Context, p part, content []byte) error { return out.blob(p.blob, content) })
	if err != nil {
		return digest, err
	}
	manifest, config, err := a.seal(snap)
	if err != nil {
		return digest, err
	}
	if err := errors.Join(out.blob(describe(config), config), out.blob(describe(manifest), manifest)); err != nil {
		return digest, err
	}
	digest = describe(manifest).Digest
	index := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{{
		MediaType: types.OCIManifestSchema1, ArtifactType: ArtifactType, Digest: digest, Size: int64(len(manifest)),
		Annotations: map[string]string{kindKey: imageKind},
	}}}
	if o.Key != nil {
		signed, err := out.signatures(o.Key, digest)
		if err != nil {
			return digest, err
		}
		index.Manifests = append(index.Manifests, signed)
	}
	b, err := json.Marshal(index)
	if err != nil {
		return digest, err
	}
	if err := out.file(indexName, b); err != nil {
		return digest, err
	}
	if err := out.tar.Close(); err != nil {
		return digest, err
	}
	report.Phase(image.Progress{Phase: image.PhaseDone})
	return digest, nil
}

// prepare refuses snapshots that must not be packed, and damaged ones.
func prepare(ctx context.Context, snap *snapshot.Snapshot, report *image.Reporter) error {
	if err := Packable(snap.Manifest()); err != nil {
		return err
	}
	report.Phase(image.Progress{Phase: image.PhaseVerify})
	return snap.Verify(ctx)
}

// total is the number of bytes of a snapshot, zeros included.
func total(snap *snapshot.Snapshot) int64 {
	n := uint64(len(snap.State()))
	for _, ref := range snap.Manifest().Layers() {
		n += ref.Size
	}
	return int64(n)
}

// seal returns the manifest and the configuration of a pack whose parts are
// known.
func (a *artifact) seal(snap *snapshot.Snapshot) (manifest, config []byte, err error) {
	if config, err = snap.Manifest().Encode(); err != nil {
		return nil, nil, err
	}
	a.config = describe(config)
	a.config.MediaType = configType
	manifest, err = a.encode(snap.Manifest())
	return manifest, config, err
}

// archive writes a layout. Its content does not depend on when and by whom it
// is written.
type archive struct {
	tar  *tar.Writer
	time time.Time
	has  map[v1.Hash]bool
}

// blob writes a blob, unless the archive has it already.
func (a *archive) blob(d v1.Descriptor, content []byte) error {
	if a.has[d.Digest] {
		return nil
	}
	a.has[d.Digest] = true
	return a.file(blobPrefix+d.Digest.Hex, content)
}

func (a *archive) file(name string, content []byte) error {
	err := a.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o444, Size: int64(len(content)), ModTime: a.time, Format: tar.FormatUSTAR})
	if err == nil {
		_, err = a.tar.Write(content)
	}
	return err
}

// signatures writes a signature with its blobs, and returns the descriptor of
// its manifest.
func (a *archive) signatures(key *Signer, digest v1.Hash) (d v1.Descriptor, err error) {
	img, err := key.sign(emptySignatures(), fileIdentity, digest)
	if err != nil {
		return d, err
	}
	manifest, err := img.RawManifest()
	if err != nil {
		return d, err
	}
	config, err := img.RawConfigFile()
	if err != nil {
		return d, err
	}
	blobs := [][]byte{config, manifest}
	layers, err := img.Layers()
	if err != nil {
		return d, err
	}
	for _, l := range layers {
		r, err := l.Compressed()
		if err != nil {
			return d, err
		}
		b, err := io.ReadAll(r)
		if err = errors.Join(err, r.Close()); err != nil {
			return d, err
		}
		blobs = append(blobs, b)
	}
	for _, b := range blobs {
		if err := a.blob(describe(b), b); err != nil {
			return d, err
		}
	}
	d = describe(manifest)
	d.MediaType, d.Annotations = types.OCIManifestSchema1, map[string]string{kindKey: signaturesKind}
	return d, nil
}

// Read unpacks a file that Write has written, and makes the snapshot at dir.
func Read(ctx context.Context, r io.ReaderAt, size int64, dir string, o UnpackOptions) (*snapshot.Snapshot, error) {
	report := image.NewReporter(o.Progress)
	l, err := openLayout(r, size, report)
	if err != nil {
		return nil, fmt.Errorf("unpack snapshot: %w", err)
	}
	manifest, err := l.small(ctx, l.manifest)
	var snap *snapshot.Snapshot
	if err == nil {
		snap, err = unpack(ctx, l, manifest, dir, report, o)
	}
	if err != nil {
		return nil, fmt.Errorf("unpack snapshot: %w", err)
	}
	report.Phase(image.Progress{Phase: image.PhaseDone})
	return snap, nil
}

// layout is an open file in the format of Write.
type layout struct {
	report   *image.Reporter
	entries  map[string]*io.SectionReader // by name
	manifest v1.Descriptor
	signed   *v1.Descriptor
}

// openLayout lists the entries of a file. It accepts only names that it knows,
// and digests.
func openLayout(r io.ReaderAt, size int64, report *image.Reporter) (*layout, error) {
	l := &layout{report: report, entries: map[string]*io.SectionReader{}}
	all := io.NewSectionReader(r, 0, size)
	in := tar.NewReader(all)
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("it is no packed snapshot, or damaged: %w", err)
		}
		start, err := all.Seek(0, io.SeekCurrent)
		if err != nil {
			return nil, err
		}
		if err := l.add(h, r, start, size); err != nil {
			return nil, err
		}
	}
	if err := l.checkVersion(); err != nil {
		return nil, err
	}
	return l, l.readIndex()
}

// add records one entry of the archive.
func (l *layout) add(h *tar.Header, r io.ReaderAt, start, size int64) error {
	name := h.Name
	if h.Typeflag == tar.TypeDir && (name == "blobs/" || name == blobPrefix) {
		return nil
	}
	known := name == layoutName || name == indexName
	if hex, ok := strings.CutPrefix(name, blobPrefix); ok {
		_, err := layer.ParseDigest(hex)
		known = err == nil
	}
	_, twice := l.entries[name]
	switch {
	case !known:
		return fmt.Errorf("it has an entry %.100q, which no packed snapshot has", name)
	case h.Typeflag != tar.TypeReg || sparse(h):
		return fmt.Errorf("its entry %s is no plain file", name)
	case twice:
		return fmt.Errorf("its entry %s comes twice", name)
	case len(l.entries) >= maxEntries:
		return fmt.Errorf("it has more than %d entries", maxEntries)
	case h.Size < 0 || h.Size > size-start:
		return fmt.Errorf("it is truncated: its entry %s has %d bytes, %d are left", name, h.Size, size-start)
	}
	l.entries[name] = io.NewSectionReader(r, start, h.Size)
	return nil
}

// sparse reports whether the entry's content differs from the bytes at its
// place in the archive.
func sparse(h *tar.Header) bool {
	for k := range h.PAXRecords {
		if strings.HasPrefix(k, "GNU.sparse.") {
			return true
		}
	}
	return false
}

func (l *layout) checkVersion() error {
	b, err := l.read(layoutName, maxLayout)
	if err != nil {
		return err
	}
	var v struct {
		Version string `json:"imageLayoutVersion"`
	}
	if err := json.Unmarshal(b, &v); err != nil || v.Version != "1.0.0" {
		return fmt.Errorf("%s: it is of version %.40q, this agentrun reads 1.0.0", layoutName, v.Version)
	}
	return nil
}

// readIndex finds the manifest and the manifest of its signatures.
func (l *layout) readIndex() error {
	b, err := l.read(indexName, maxIndex)
	if err != nil {
		return err
	}
	var index v1.IndexManifest
	if err := strict(b, maxIndex, &index); err != nil {
		return fmt.Errorf("%s: %w", indexName, err)
	}
	found := 0
	for _, d := range index.Manifests {
		artifactType := d.ArtifactType
		d.ArtifactType = "" // the manifest itself must state it
		if err := plain(d, types.OCIManifestSchema1, maxManifest); err != nil {
			return fmt.Errorf("%s: %w", indexName, err)
		}
		if d.Annotations[kindKey] == signaturesKind && artifactType == "" && l.signed == nil {
			l.signed = &d
			continue
		}
		l.manifest = d
		found++
	}
	if found != 1 {
		return fmt.Errorf("%s: it names %d snapshots, not one", indexName, found)
	}
	return nil
}

// read reads a whole entry.
func (l *layout) read(name string, limit int64) ([]byte, error) {
	e := l.entries[name]
	if e == nil {
		return nil, fmt.Errorf("%s is missing: it is no packed snapshot, or truncated", name)
	}
	if e.Size() > limit {
		return nil, fmt.Errorf("%s has %d bytes, more than %d", name, e.Size(), limit)
	}
	b := make([]byte, e.Size())
	if _, err := e.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return b, nil
}

// find returns the entry of a blob, which must have the size of its descriptor.
func (l *layout) find(d v1.Descriptor) (*io.SectionReader, error) {
	e := l.entries[blobPrefix+d.Digest.Hex]
	if e == nil {
		return nil, fmt.Errorf("blob %s is missing", d.Digest)
	}
	if e.Size() != d.Size {
		return nil, fmt.Errorf("blob %s has %d bytes, the manifest says %d", d.Digest, e.Size(), d.Size)
	}
	return e, nil
}

func (l *layout) small(_ context.Context, d v1.Descriptor) ([]byte, error) {
	if _, err := l.find(d); err != nil {
		return nil, err
	}
	b, err := l.read(blobPrefix+d.Digest.Hex, maxManifest)
	if err != nil {
		return nil, err
	}
	return b, same(sha256.Sum256(b), d)
}

// same refuses content that does not match its descriptor.
func same(got layer.Digest, d v1.Descriptor) error {
	if hashOf(got) != d.Digest {
		return fmt.Errorf("blob %s is damaged: its digest is %s", d.Digest, hashOf(got))
	}
	return nil
}

func (l *layout) part(ctx context.Context, d v1.Descriptor) (io.ReadCloser, error) {
	e, err := l.find(d)
	if err != nil {
		return nil, err
	}
	hash := sha256.New()
	if _, err := io.CopyBuffer(hash, withContext{ctx, io.NewSectionReader(e, 0, e.Size())}, make([]byte, bufferSize)); err != nil {
		return nil, err
	}
	if err := same(layer.Digest(hash.Sum(nil)), d); err != nil {
		return nil, err
	}
	l.report.Bytes(d.Size)
	return io.NopCloser(io.NewSectionReader(e, 0, e.Size())), nil
}

func (l *layout) phase() image.Phase { return image.PhaseUnpack }

func (l *layout) signatures(ctx context.Context, _ v1.Hash) ([]byte, error) {
	if l.signed == nil {
		return nil, nil
	}
	return l.small(ctx, *l.signed)
}

// complete refuses a file with blobs that its manifests do not name.
func (l *layout) complete(ctx context.Context, a *artifact) error {
	named := map[string]bool{layoutName: true, indexName: true}
	name := func(d v1.Descriptor) { named[blobPrefix+d.Digest.Hex] = true }
	name(l.manifest)
	name(a.config)
	for _, p := range a.parts {
		name(p.blob)
	}
	if l.signed != nil {
		name(*l.signed)
		b, err := l.small(ctx, *l.signed)
		if err != nil {
			return fmt.Errorf("signatures: %w", err)
		}
		m, err := parseSignatures(b)
		if err != nil {
			return err
		}
		name(m.Config)
		for _, d := range m.Layers {
			name(d)
		}
	}
	for e := range l.entries {
		if !named[e] {
			return fmt.Errorf("it has an entry %s that belongs to nothing", e)
		}
	}
	return nil
}
