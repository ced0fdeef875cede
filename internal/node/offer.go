package node

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/peer"
	"agentrun.dev/internal/storage/snapshot"
)

// This node offers other nodes the snapshots of its templates, and nothing else.
// docs/design/peer.md describes all of it.

// offered finds the ready build whose snapshot has a digest. It looks at nothing else in the
// state folder, so neither checkpoints nor hibernated sandboxes are ever found.
func (m *Manager) offered(digest string) (found sandbox.Build, err error) {
	if _, err := snapshot.ParseID(digest); err != nil {
		return found, sandbox.Invalid("snapshot", "%v", err)
	}
	var ready []sandbox.Build
	err = m.db.View(func(tx *journal.Tx) error {
		return builds.Each(tx, "", func(_ string, b sandbox.Build) error {
			if b.Phase == sandbox.PhaseReady {
				ready = append(ready, b)
			}
			return nil
		})
	})
	if err != nil {
		return found, err
	}
	for _, b := range ready {
		manifest, err := snapshot.ReadManifest(m.snapshotDir(b.Snapshot))
		if err != nil {
			continue // it is being removed
		}
		if id, err := peer.IDOf(manifest); err == nil && id.String() == digest {
			return b, nil
		}
	}
	return found, sandbox.Errorf(sandbox.CodeNotFound, "no template here has the snapshot %s", digest).
		Try("Ask a node that has it: GetNode shows the snapshots of a node")
}

// openOffered opens a snapshot that other nodes may read.
func (m *Manager) openOffered(digest string) (*snapshot.Snapshot, sandbox.Build, error) {
	b, err := m.offered(digest)
	if err != nil {
		return nil, b, err
	}
	dir := m.snapshotDir(b.Snapshot)
	manifest, err := snapshot.ReadManifest(dir)
	if err == nil {
		err = peer.Travels(manifest)
	}
	if errors.Is(err, peer.ErrSealed) {
		return nil, b, sandbox.Errorf(sandbox.CodeConflict, "the snapshot %s stays on this node", digest).Because("%v", err)
	}
	if err != nil {
		return nil, b, err
	}
	snap, err := snapshot.Open(dir)
	return snap, b, err
}

// SnapshotOffer returns all that another node needs to fetch a template's snapshot, except for
// its content.
func (m *Manager) SnapshotOffer(_ context.Context, digest string) (sandbox.Offer, error) {
	snap, b, err := m.openOffered(digest)
	if err != nil {
		return sandbox.Offer{}, err
	}
	defer func() { _ = snap.Close() }() // only read
	manifest, err := snap.Manifest().Encode()
	if err != nil {
		return sandbox.Offer{}, err
	}
	built, err := sandbox.EncodeBuilt(b.Built)
	return sandbox.Offer{Revision: b.Revision, Stage: b.Stage, Digest: digest, Manifest: manifest, Built: built}, err
}

// SnapshotDigests returns a page of the digests of the parts of a layer.
func (m *Manager) SnapshotDigests(ctx context.Context, r sandbox.SnapshotRead, from uint32) ([]byte, error) {
	var page peer.Digests
	err := m.serveLayer(ctx, r, func(snap *snapshot.Snapshot, blob layer.Digest) (err error) {
		page, err = m.serves.Digests(ctx, snap, blob, from)
		return err
	})
	return page.Page(), err
}

// ReadSnapshot sends parts of a layer, in the requested order.
func (m *Manager) ReadSnapshot(ctx context.Context, r sandbox.SnapshotRead, send func(number uint32, content []byte) error) error {
	return m.serveLayer(ctx, r, func(snap *snapshot.Snapshot, blob layer.Digest) error {
		return m.serves.Read(ctx, snap, blob, r.Parts, send)
	})
}

func (m *Manager) serveLayer(ctx context.Context, r sandbox.SnapshotRead, do func(*snapshot.Snapshot, layer.Digest) error) error {
	blob, err := layer.ParseDigest(r.Layer)
	if err != nil {
		return sandbox.Invalid("layer", "%v", err)
	}
	leave, err := m.serves.Enter(ctx, string(sandbox.PrincipalOf(ctx)))
	if errors.Is(err, peer.ErrBusy) {
		return sandbox.Errorf(sandbox.CodeCapacity, "the snapshot %.12s cannot be read now", r.Snapshot).Because("%v", err)
	}
	if err != nil {
		return err
	}
	defer leave()
	snap, _, err := m.openOffered(r.Snapshot)
	if err != nil {
		return err
	}
	defer func() { _ = snap.Close() }() // only read
	if err = do(snap, blob); errors.Is(err, peer.ErrAsked) {
		return sandbox.Errorf(sandbox.CodeInvalid, "the parts of layer %s cannot be read", r.Layer).Because("%v", err)
	}
	return err
}

// offer is a parsed offer of another node, checked as far as possible without its
// content.
type offer struct {
	id       snapshot.ID
	manifest snapshot.Manifest
	built    sandbox.Built
}

// checkOffer refuses an offer that this node cannot use, and names the
// difference.
func (m *Manager) checkOffer(o sandbox.Offer, spec sandbox.TemplateSpec) (out offer, err error) {
	if out.built, err = sandbox.ParseBuilt(o.Built); err != nil {
		return out, err
	}
	if out.manifest, err = snapshot.ParseManifest(o.Manifest); err != nil {
		return out, sandbox.Invalid("offer.manifest", "%v", err)
	}
	out.id = sha256.Sum256(o.Manifest)
	if out.id.String() != o.Digest {
		return out, sandbox.Invalid("offer.digest", "the manifest is that of snapshot %s, not of %s", out.id, sandbox.Quote(o.Digest))
	}
	return out, m.fits(out.manifest, spec)
}

// fits refuses a snapshot that this node cannot use for a template, or would make
// again.
func (m *Manager) fits(manifest snapshot.Manifest, spec sandbox.TemplateSpec) error {
	refuse := func(format string, a ...any) error {
		return sandbox.Errorf(sandbox.CodeConflict, "the snapshot does not fit this node").Because(format, a...).
			Try("Apply the template, to have it built here")
	}
	if err := peer.Travels(manifest); err != nil {
		return refuse("%v", err)
	}
	for _, b := range peer.Blobs(manifest) {
		if b.Size > peer.MaxLayer {
			return refuse("layer %s has %s, more than %s", b.Digest, sandbox.Mebibytes(b.Size), sandbox.Mebibytes(peer.MaxLayer))
		}
	}
	if err := m.cfg.Engine.Fits(manifest); errors.Is(err, engine.ErrMismatch) {
		return refuse("%v", err)
	} else if err != nil {
		return err
	}
	why, err := engine.Outdated(m.cfg.Engine, manifest)
	if err != nil {
		return err
	}
	if why != "" {
		return refuse("%s", why)
	}
	// A machine's memory is reserved by the spec.
	if has := m.cfg.Engine.Reserve(manifest.Memory.Size, spec.Disk); manifest.Memory.Size > spec.Memory && has > m.machineMemory(spec) {
		return refuse("its machine has %s of memory, the template says %s", sandbox.Mebibytes(manifest.Memory.Size), sandbox.Mebibytes(spec.Memory))
	}
	return nil
}

// digestOf is the digest of bytes, in hexadecimal.
func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// revisionOf compares the revision of an offer with the one that this node derives from the
// same spec, and returns its image. Revisions of earlier versions did not include the image.
func revisionOf(o sandbox.Offer, built sandbox.Built, spec sandbox.TemplateSpec, ca string) (image string, err error) {
	if built.TrustedCA != ca {
		return "", sandbox.Errorf(sandbox.CodeConflict, "the snapshot does not fit this node").
			Because("its sandboxes trust %s, those of the template would trust %s here", caName(built.TrustedCA), caName(ca)).
			Try("Give the namespace the same CA on all nodes (SetNamespaceCA), or apply the template to have it built here")
	}
	switch o.Revision {
	case spec.RevisionWith(ca, built.Image):
		return built.Image, nil
	case spec.RevisionWith(ca, ""):
		return "", nil
	}
	return "", sandbox.Errorf(sandbox.CodeConflict, "the offer is of another template").
		Because("its revision is %s, and this spec with the image %s has the revision %s", sandbox.Quote(o.Revision), built.Image, spec.RevisionWith(ca, built.Image)).
		Try("Send the spec that the snapshot was built of")
}

func caName(fingerprint string) string {
	if fingerprint == "" {
		return "no CA"
	}
	return fmt.Sprintf("the CA %.12s", fingerprint)
}
