package pack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/internal/storage/image"
	"agentrun.dev/internal/storage/snapshot"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"
)

// Push packs a snapshot into a registry. Blobs that the registry has are not
// sent again, so an interrupted push continues where it stopped. Push returns
// the digest of the pack's manifest.
func Push(ctx context.Context, snap *snapshot.Snapshot, ref image.Reference, at image.Registries, o PackOptions) (v1.Hash, error) {
	repo, err := at.Open(ref)
	if err != nil {
		return v1.Hash{}, fmt.Errorf("push snapshot %s to %s: %w", snap.ID(), ref, err)
	}
	defer repo.Close()
	digest, err := push(ctx, snap, repo, o)
	if err != nil {
		return v1.Hash{}, fmt.Errorf("push snapshot %s to %s: %w", snap.ID(), ref, repo.Explain(err))
	}
	return digest, nil
}

func push(ctx context.Context, snap *snapshot.Snapshot, repo *image.Repository, o PackOptions) (digest v1.Hash, err error) {
	if repo.Pinned() {
		return digest, errors.New("a digest cannot be chosen: name a tag")
	}
	report := image.NewReporter(o.Progress)
	if err := prepare(ctx, snap, report); err != nil {
		return digest, err
	}
	report.Phase(image.Progress{Phase: image.PhaseUpload, Total: total(snap)})
	upload := func(ctx context.Context, d v1.Descriptor, content []byte) error {
		return repo.Upload(ctx, image.Blob{Descriptor: d, Open: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil }})
	}
	a := artifact{}
	a.parts, err = cut(ctx, snap, report, anyOrder, func(ctx context.Context, p part, content []byte) error {
		return upload(ctx, p.descriptor(), content)
	})
	if err != nil {
		return digest, err
	}
	manifest, config, err := a.seal(snap)
	if err != nil {
		return digest, err
	}
	if err := upload(ctx, a.config, config); err != nil {
		return digest, err
	}
	digest = describe(manifest).Digest
	// The signature comes before the tag: a client that finds the tag finds the
	// signature.
	if o.Key != nil {
		if err := pushSignature(ctx, repo, o.Key, digest); err != nil {
			return digest, fmt.Errorf("sign: %w", err)
		}
	}
	if err := repo.Put(ctx, repo.Reference(), manifest, types.OCIManifestSchema1); err != nil {
		return digest, err
	}
	report.Phase(image.Progress{Phase: image.PhaseDone})
	return digest, nil
}

// signatureTag is where cosign looks for the signatures of a manifest.
func signatureTag(manifest v1.Hash) string { return manifest.Algorithm + "-" + manifest.Hex + ".sig" }

// pushSignature adds a signature to the existing ones.
func pushSignature(ctx context.Context, repo *image.Repository, key *Signer, digest v1.Hash) error {
	tag := repo.Tag(signatureTag(digest))
	src := remoteSource{repo, image.NewReporter(nil)}
	raw, err := src.signatures(ctx, digest)
	if err != nil {
		return err
	}
	img := emptySignatures()
	if raw != nil {
		m, err := parseSignatures(raw)
		if err != nil {
			return err
		}
		if len(m.Layers) >= maxSignatures || m.Config.Size > maxManifest {
			return fmt.Errorf("it has %d signatures already, and a configuration of %d bytes", len(m.Layers), m.Config.Size)
		}
		if mine, err := key.verifier(); err != nil || mine.check(ctx, src, digest) == nil {
			return err // signed before
		}
		if img, err = repo.GetImage(ctx, tag); err != nil {
			return err
		}
	}
	if img, err = key.sign(img, repo.Name(), digest); err != nil {
		return err
	}
	return repo.PutImage(ctx, tag, img)
}

// Pull fetches a pack that Push has put into a registry, and makes the snapshot
// at dir.
func Pull(ctx context.Context, ref image.Reference, dir string, at image.Registries, o UnpackOptions) (*snapshot.Snapshot, error) {
	repo, err := at.Open(ref)
	if err != nil {
		return nil, fmt.Errorf("pull snapshot %s: %w", ref, err)
	}
	defer repo.Close()
	snap, err := pull(ctx, repo, dir, o)
	if err != nil {
		return nil, fmt.Errorf("pull snapshot %s: %w", ref, repo.Explain(err))
	}
	return snap, nil
}

func pull(ctx context.Context, repo *image.Repository, dir string, o UnpackOptions) (*snapshot.Snapshot, error) {
	report := image.NewReporter(o.Progress)
	report.Phase(image.Progress{Phase: image.PhaseResolve})
	manifest, desc, err := repo.Get(ctx, repo.Reference())
	if err != nil {
		return nil, err
	}
	if desc.MediaType.IsIndex() {
		return nil, errors.New("it is an image for several platforms, not a snapshot: agentrun image pull takes it")
	}
	snap, err := unpack(ctx, remoteSource{repo, report}, manifest, dir, report, o)
	if err != nil {
		return nil, err
	}
	report.Phase(image.Progress{Phase: image.PhaseDone})
	return snap, nil
}

// remoteSource is a repository of a registry as a source.
type remoteSource struct {
	repo   *image.Repository
	report *image.Reporter
}

// complete accepts everything: a repository may also hold other blobs.
func (remoteSource) complete(context.Context, *artifact) error { return nil }

func (remoteSource) phase() image.Phase { return image.PhaseDownload }

func (s remoteSource) small(ctx context.Context, d v1.Descriptor) ([]byte, error) {
	r, err := s.part(ctx, d)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(r)
	return b, errors.Join(err, r.Close())
}

// part fetches a blob into memory. A part is small enough for that, and a
// killed process leaves no file.
func (s remoteSource) part(ctx context.Context, d v1.Descriptor) (io.ReadCloser, error) {
	fd, err := unix.MemfdCreate("agentrun-part", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memory for a part: %w", err)
	}
	f := os.NewFile(uintptr(fd), "part")
	err = s.repo.Fetch(ctx, d, f, s.report)
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (s remoteSource) signatures(ctx context.Context, manifest v1.Hash) ([]byte, error) {
	b, _, err := s.repo.Get(ctx, s.repo.Tag(signatureTag(manifest)))
	if errors.Is(err, image.ErrNotThere) {
		return nil, nil
	}
	return b, err
}
