package pack

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Types of a pack's manifest, its configuration and its parts.
const (
	ArtifactType = "application/vnd.agentrun.snapshot.v1"

	configType types.MediaType = "application/vnd.agentrun.snapshot.manifest.v1+json"
	stateType  types.MediaType = "application/vnd.agentrun.snapshot.state.v1+zstd"
	layerType  types.MediaType = "application/vnd.agentrun.snapshot.layer.v1+zstd"

	artifactPrefix = "application/vnd.agentrun.snapshot."
)

// Annotations of a part. The state has no layerKey.
const (
	layerKey  = "dev.agentrun.snapshot.layer"  // the layer's digest
	offsetKey = "dev.agentrun.snapshot.offset" // where in the layer
	sizeKey   = "dev.agentrun.snapshot.size"   // decompressed
	digestKey = "dev.agentrun.snapshot.digest" // decompressed
)

const (
	// PartSize is the greatest size of a part. Several parts are transferred at
	// a time, and each is in memory meanwhile.
	PartSize = 32 << 20
	// A manifest with maxParts parts fits into maxManifest bytes, a size that
	// registries accept.
	maxParts    = 8192
	maxManifest = 4 << 20
	// maxPartBlob is more than incompressible content of PartSize bytes takes.
	maxPartBlob = PartSize + 1<<20
)

// part is a range of a layer, or the state.
type part struct {
	blob   v1.Descriptor // compressed
	state  bool
	layer  layer.Digest
	offset uint64
	size   uint64       // decompressed
	digest layer.Digest // likewise
}

// artifact is the content of a pack's manifest.
type artifact struct {
	config v1.Descriptor
	parts  []part
}

// encode returns the pack's manifest.
func (a artifact) encode(m snapshot.Manifest) ([]byte, error) {
	if len(a.parts) > maxParts {
		return nil, fmt.Errorf("the snapshot has %d parts of %d MiB, more than the %d that a pack can have", len(a.parts), PartSize>>20, maxParts)
	}
	out := v1.Manifest{
		SchemaVersion: 2, MediaType: types.OCIManifestSchema1, ArtifactType: ArtifactType, Config: a.config,
		Annotations: map[string]string{
			"org.opencontainers.image.created": m.Created.Format("2006-01-02T15:04:05Z"),
			"dev.agentrun.snapshot.engine":     m.Engine,
		},
	}
	for _, p := range a.parts {
		out.Layers = append(out.Layers, p.descriptor())
	}
	b, err := json.Marshal(out)
	if err == nil && len(b) > maxManifest {
		err = fmt.Errorf("the pack's manifest has %d bytes, more than %d", len(b), maxManifest)
	}
	return b, err
}

func (p part) descriptor() v1.Descriptor {
	d := p.blob
	d.MediaType = stateType
	d.Annotations = map[string]string{
		offsetKey: strconv.FormatUint(p.offset, 10), sizeKey: strconv.FormatUint(p.size, 10), digestKey: hashOf(p.digest).String(),
	}
	if !p.state {
		d.MediaType = layerType
		d.Annotations[layerKey] = hashOf(p.layer).String()
	}
	return d
}

// parse reads a pack's manifest and checks everything that can be checked
// without the snapshot's own manifest.
func parse(raw []byte) (*artifact, error) {
	var m v1.Manifest
	if err := strict(raw, maxManifest, &m); err != nil {
		return nil, fmt.Errorf("manifest: %w", err)
	}
	if err := checkKind(m); err != nil {
		return nil, err
	}
	if err := plain(m.Config, configType, snapshot.MaxManifest); err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	if len(m.Config.Annotations) > 0 {
		return nil, errors.New("config: it has annotations")
	}
	if len(m.Layers) == 0 || len(m.Layers) > maxParts {
		return nil, fmt.Errorf("it has %d parts, not 1 to %d", len(m.Layers), maxParts)
	}
	a := &artifact{config: m.Config}
	for i, d := range m.Layers {
		p, err := parsePart(d)
		if err == nil && p.state != (i == 0) {
			err = errors.New("the state comes first and once")
		}
		if err != nil {
			return nil, fmt.Errorf("part %d of %d: %w", i+1, len(m.Layers), err)
		}
		a.parts = append(a.parts, p)
	}
	return a, nil
}

// strict decodes one JSON value that has no fields besides those of v.
func strict(raw []byte, limit int, v any) error {
	if len(raw) > limit {
		return fmt.Errorf("more than %d bytes", limit)
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("damaged: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("damaged: something follows its end")
	}
	return nil
}

// checkKind refuses manifests of anything but packs. Its error says which kind
// it found.
func checkKind(m v1.Manifest) error {
	kind := m.ArtifactType
	if kind == "" {
		kind = string(m.Config.MediaType)
	}
	switch {
	case m.ArtifactType == ArtifactType:
	case strings.HasPrefix(kind, artifactPrefix):
		return fmt.Errorf("it is a pack of another version (%.80q), this agentrun reads %s: use the version that made it", kind, ArtifactType)
	case m.Config.MediaType.IsConfig():
		return errors.New("it is an image, not a snapshot: agentrun image pull or import takes it")
	default:
		return fmt.Errorf("it is no packed snapshot, but %.80q", kind)
	}
	if m.SchemaVersion != 2 || m.MediaType != types.OCIManifestSchema1 || m.Subject != nil {
		return fmt.Errorf("manifest: version %d of type %.80q, not 2 of %s without a subject", m.SchemaVersion, m.MediaType, types.OCIManifestSchema1)
	}
	return nil
}

// plain checks the descriptor of a blob, which must be in the pack itself.
func plain(d v1.Descriptor, kind types.MediaType, limit int64) error {
	switch {
	case d.MediaType != kind:
		return fmt.Errorf("it is of type %.80q, not %s", d.MediaType, kind)
	case d.Digest.Algorithm != "sha256":
		return fmt.Errorf("its digest is of kind %.80q, not sha256", d.Digest.Algorithm)
	case d.Size <= 0 || d.Size > limit:
		return fmt.Errorf("it has %d bytes, not 1 to %d", d.Size, limit)
	case len(d.URLs) > 0 || len(d.Data) > 0 || d.Platform != nil || d.ArtifactType != "":
		return errors.New("it has URLs, data, a platform or an artifact type")
	}
	_, err := layer.ParseDigest(d.Digest.Hex)
	return err
}

func parsePart(d v1.Descriptor) (p part, err error) {
	p.state = d.MediaType == stateType
	kind, keys := layerType, []string{offsetKey, sizeKey, digestKey, layerKey}
	if p.state {
		kind, keys = stateType, keys[:3]
	}
	if err := plain(d, kind, maxPartBlob); err != nil {
		return p, err
	}
	for _, k := range keys {
		if _, ok := d.Annotations[k]; !ok {
			return p, fmt.Errorf("annotation %s is missing", k)
		}
	}
	if len(d.Annotations) != len(keys) {
		return p, fmt.Errorf("it has %d annotations, not %d", len(d.Annotations), len(keys))
	}
	p.blob = v1.Descriptor{MediaType: d.MediaType, Digest: d.Digest, Size: d.Size}
	if p.offset, err = parseNumber(d.Annotations[offsetKey]); err != nil {
		return p, fmt.Errorf("%s: %w", offsetKey, err)
	}
	if p.size, err = parseNumber(d.Annotations[sizeKey]); err != nil {
		return p, fmt.Errorf("%s: %w", sizeKey, err)
	}
	if p.digest, err = parseHash(d.Annotations[digestKey]); err != nil {
		return p, fmt.Errorf("%s: %w", digestKey, err)
	}
	if p.state {
		if p.offset != 0 || p.size == 0 || p.size > snapshot.MaxState {
			return p, fmt.Errorf("the state has %d bytes at %d, not 1 to %d at 0", p.size, p.offset, snapshot.MaxState)
		}
		return p, nil
	}
	if p.layer, err = parseHash(d.Annotations[layerKey]); err != nil {
		return p, fmt.Errorf("%s: %w", layerKey, err)
	}
	if p.size == 0 || p.size > PartSize || p.size%layer.PageSize != 0 || p.offset%layer.PageSize != 0 || p.offset > layer.MaxSize {
		return p, fmt.Errorf("%d bytes at %d: not 1 to %d in whole pages", p.size, p.offset, PartSize)
	}
	return p, nil
}

// parseNumber accepts only the canonical form of a number.
func parseNumber(s string) (uint64, error) {
	n, err := strconv.ParseUint(s, 10, 63)
	if err != nil || strconv.FormatUint(n, 10) != s {
		return 0, fmt.Errorf("%.40q is no number", s)
	}
	return n, nil
}

const hashPrefix = "sha256:"

func parseHash(s string) (layer.Digest, error) {
	hex, ok := strings.CutPrefix(s, hashPrefix)
	if !ok {
		return layer.Digest{}, fmt.Errorf("%.80q does not begin with %s", s, hashPrefix)
	}
	return layer.ParseDigest(hex)
}

func hashOf(d layer.Digest) v1.Hash { return v1.Hash{Algorithm: "sha256", Hex: d.String()} }

// arrange compares the parts with a snapshot's manifest, and returns those of
// each layer, in the order of m.Layers. It refuses parts that overlap, belong to
// no layer, or are out of order. Ranges without a part are zeros.
func (a *artifact) arrange(m snapshot.Manifest) ([][]part, error) {
	if s := a.parts[0]; s.size != m.State.Size || s.digest != m.State.Digest {
		return nil, fmt.Errorf("the state has %d bytes with digest %s, the snapshot's has %d with %s", s.size, s.digest, m.State.Size, m.State.Digest)
	}
	rest := a.parts[1:]
	var out [][]part
	for _, ref := range m.Layers() {
		var of []part
		var end uint64
		for len(rest) > 0 && rest[0].layer == ref.Digest {
			p := rest[0]
			if p.offset < end || p.size > ref.Size || p.offset > ref.Size-p.size {
				return nil, fmt.Errorf("a part of layer %s has %d bytes at %d: the one before ends at %d, the layer at %d", ref.Digest, p.size, p.offset, end, ref.Size)
			}
			end = p.offset + p.size
			of, rest = append(of, p), rest[1:]
		}
		out = append(out, of)
	}
	if len(rest) > 0 {
		return nil, fmt.Errorf("a part of layer %s is not of this snapshot, or not where it belongs", rest[0].layer)
	}
	return out, nil
}
