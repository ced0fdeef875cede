package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"agentrun.dev/internal/durable"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/peer"
	"agentrun.dev/internal/storage/snapshot"
)

// A fetch of a snapshot is a build by other means: it waits, is tried again, goes on after a
// restart, and is replaced and deleted as all builds are.

// Peers gets snapshots from other nodes and from registries.
type Peers interface {
	// Dial makes a peer of an address, without sending anything yet.
	Dial(sandbox.PeerAddress) (Peer, error)
	// Pull makes a snapshot, in the new folder dir, from a pack in a registry.
	Pull(ctx context.Context, pack, dir string, o PullRequest) (*snapshot.Snapshot, error)
}

// Peer is another node.
type Peer interface {
	peer.Source
	io.Closer
}

// PullRequest says how a pack is pulled.
type PullRequest struct {
	// Accept refuses an unwanted snapshot before its content is fetched.
	Accept func(snapshot.Manifest) error
	// Lend returns a snapshot of this node that has a layer, or nil.
	Lend func(layer.Ref) *snapshot.Snapshot
}

// fetches is the number of snapshots that are fetched at once.
const fetches = 4

// orderFile is the file with the manifest of a snapshot that a build has to
// fetch.
func (m *Manager) orderFile(id sandbox.ID) string {
	return filepath.Join(m.cfg.Dir, fetchingDir, string(id)+".manifest")
}

// partsDir is the folder of the parts of a snapshot that were fetched so far.
func (m *Manager) partsDir(digest string) string {
	return filepath.Join(m.cfg.Dir, fetchingDir, digest)
}

// FetchTemplate makes a template or changes it, as ApplyTemplate does. Where ApplyTemplate
// would build its snapshot, FetchTemplate has it fetched from other nodes. It refuses an
// offer that does not fit.
func (m *Manager) FetchTemplate(ctx context.Context, r sandbox.FetchRequest) (sandbox.Template, error) {
	if err := errors.Join(m.beginMaking(), sandbox.MayGive(ctx, r.Owner)); err != nil {
		return sandbox.Template{}, err
	}
	if err := r.Validate(); err != nil {
		return sandbox.Template{}, err
	}
	if m.cfg.Peers == nil {
		return sandbox.Template{}, errFetchesNone()
	}
	if err := m.checkDisk(r.Spec); err != nil {
		return sandbox.Template{}, err
	}
	what, err := m.checkOffer(r.Offer, r.Spec)
	if err != nil {
		return sandbox.Template{}, err
	}
	_, ca, err := m.templateCA(r.Namespace, r.Spec)
	if err != nil {
		return sandbox.Template{}, fmt.Errorf("fetch template %s: %w", r.Key, err)
	}
	t := sandbox.Template{Key: r.Key, Spec: r.Spec, Revision: r.Offer.Revision, Created: time.Now().UTC()}
	if t.Image, err = revisionOf(r.Offer, what.built, r.Spec, ca); err != nil {
		return sandbox.Template{}, err
	}
	defer m.templateTurns.lock(r.Key)()
	if err := m.orderFetch(ctx, r, &t); err != nil {
		return sandbox.Template{}, fmt.Errorf("fetch template %s: %w", r.Key, err)
	}
	return t, nil
}

func errFetchesNone() error {
	return sandbox.Errorf(sandbox.CodeUnimplemented, "this daemon fetches no snapshots").Try("Start it with --node-listen and the certificate of a node")
}

// orderFetch records the snapshot that is to be fetched, and starts the fetch. The caller has
// the turn of the template.
func (m *Manager) orderFetch(ctx context.Context, r sandbox.FetchRequest, t *sandbox.Template) error {
	if r.Offer.Stage == sandbox.AfterInit {
		// A template's own build is that of the other stage.
		now, err := m.Template(ctx, r.Key)
		if err != nil && !sandbox.HasCode(err, sandbox.CodeNotFound) {
			return err
		}
		if now.Revision != t.Revision {
			return sandbox.Errorf(sandbox.CodeConflict, "the template %s has not that revision here", r.Name).
				Because("a snapshot of stage %s is fetched for a template that is there", sandbox.AfterInit).
				Try("Fetch the snapshot of stage %s first", sandbox.AfterReady)
		}
	}
	id := sandbox.NewID()
	if err := durable.WriteFile(m.orderFile(id), r.Offer.Manifest, 0o600); err != nil {
		return err
	}
	err := m.writeTemplate(ctx, t, r.Owner, r.Offer.Stage, &sandbox.Build{
		Template: t.Key, Revision: t.Revision, Stage: r.Offer.Stage, Phase: sandbox.PhasePending, Started: time.Now().UTC(), Snapshot: id,
		Fetch: &sandbox.FetchOrder{Digest: r.Offer.Digest, Built: r.Offer.Built, Peers: r.Peers, Pack: r.Pack},
	})
	b, lookErr := m.build(buildKey{Template: t.Key, Revision: t.Revision, Stage: r.Offer.Stage})
	if lookErr != nil || b.Snapshot != id { // the snapshot is there, or is being built
		err = errors.Join(err, os.Remove(m.orderFile(id)))
	}
	return err
}

// dropOrder removes the files of a fetch that is over, or that is no longer wanted. b is the
// build as it began.
func (m *Manager) dropOrder(b sandbox.Build) {
	if b.Fetch == nil || m.ctx.Err() != nil { // the next daemon goes on with it
		return
	}
	err := os.Remove(m.orderFile(b.Snapshot))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err = errors.Join(err, m.dropParts(b.Fetch.Digest)); err != nil && m.ctx.Err() == nil {
		m.cfg.Log.Error("remove what was fetched", "template", b.Template, "error", err)
	}
}

// dropParts removes the fetched parts of a snapshot, unless another build needs them.
func (m *Manager) dropParts(digest string) error {
	// A fetch under way may take hours, and removes them at its end. So it is not
	// waited for.
	if wanted, err := m.partsWanted(digest); wanted || err != nil {
		return err
	}
	done, err := m.partsTurns.take(m.ctx, digest)
	if err != nil {
		return err
	}
	defer done()
	if wanted, err := m.partsWanted(digest); wanted || err != nil {
		return err
	}
	return os.RemoveAll(m.partsDir(digest))
}

// partsWanted reports whether a build in the journal has to fetch a snapshot.
func (m *Manager) partsWanted(digest string) (wanted bool, err error) {
	err = m.db.View(func(tx *journal.Tx) error {
		return builds.Each(tx, "", func(_ string, b sandbox.Build) error {
			wanted = wanted || b.Fetch != nil && b.Fetch.Digest == digest
			return nil
		})
	})
	return wanted, err
}

// tryFetch is one attempt to fetch. If it returns no error, the snapshot is
// there.
func (m *Manager) tryFetch(ctx context.Context, run *build, b *sandbox.Build) error {
	// This turn comes first: a build that waits for another fetch of the same snapshot
	// takes no place from fetches of other snapshots.
	done, err := m.partsTurns.take(ctx, b.Fetch.Digest)
	if err != nil {
		return err
	}
	defer done()
	release, err := m.fetchTurns.take(ctx, b.Template.Namespace)
	if err != nil {
		return err
	}
	defer release()
	b.Attempts++
	if m.cfg.Peers == nil {
		return errFetchesNone()
	}
	what, err := m.readOrder(*b, run.spec)
	if err != nil {
		return err
	}
	stored, err := m.admitFetch(*b, what.manifest)
	if err != nil {
		return err
	}
	defer stored()
	b.Phase, b.Problem, b.Started, b.Next = sandbox.PhaseBuilding, "", time.Now().UTC(), time.Time{}
	if err := m.putBuild(*b); err != nil {
		return err
	}
	m.noticePools()
	dir := m.snapshotDir(b.Snapshot)
	if err := m.removeSnapshot(dir); err != nil { // left by a daemon that was killed
		return err
	}
	if b.Attempts > 1 {
		_, _ = fmt.Fprintf(run.log, "== attempt %d\n", b.Attempts) // only people read the log
	}
	storing, stop := m.room.watch(ctx)
	defer stop()
	progress, err := m.fetch(storing, run, *b, what, dir)
	if progress {
		run.interrupted = 0
	}
	if err = whyNot(storing, err); err != nil {
		return errors.Join(err, m.removeSnapshot(dir))
	}
	stored()
	b.Built = what.built
	if err := m.countBuild(b, run.spec.Image); err != nil {
		return errors.Join(err, m.removeSnapshot(dir))
	}
	b.Pulled, b.Spec = 0, &run.spec
	return nil
}

// readOrder reads a recorded fetch and checks it again. It was acceptable once, but AgentRun
// may have been updated since.
func (m *Manager) readOrder(b sandbox.Build, spec sandbox.TemplateSpec) (what offer, err error) {
	manifest, err := os.ReadFile(m.orderFile(b.Snapshot))
	if err != nil {
		return what, fmt.Errorf("the manifest of the snapshot is not here any more, fetch the template again: %w", err)
	}
	return m.checkOffer(sandbox.Offer{Digest: b.Fetch.Digest, Manifest: manifest, Built: b.Fetch.Built}, spec)
}

// admitFetch makes sure that there is room for the snapshot. The caller calls stored when the
// snapshot is there or has failed; stored may be called twice.
func (m *Manager) admitFetch(b sandbox.Build, manifest snapshot.Manifest) (stored func(), err error) {
	var all uint64 // a build counts in full, with all its parts
	for _, blob := range peer.Blobs(manifest) {
		all += blob.Size
	}
	missing := peer.Missing(manifest, m.lend)
	var there snapshot.Usage
	if _, err := there.Add(m.partsDir(b.Fetch.Digest)); err != nil {
		return nil, err
	}
	left, err := m.room.pledge(missing - min(missing, there.Bytes))
	if err != nil {
		return nil, err
	}
	if err := m.capacity.store(b.Template.Namespace, all); err != nil {
		left()
		return nil, err
	}
	open := true
	return func() {
		if open {
			open = false
			left()
			m.capacity.discard(b.Template.Namespace, all)
		}
	}, nil
}

// fetch makes the snapshot from the data of peers, or from a pack. progress reports that some
// data has come.
func (m *Manager) fetch(ctx context.Context, run *build, b sandbox.Build, what offer, dir string) (progress bool, err error) {
	var sources []peer.Source
	for _, p := range b.Fetch.Peers {
		of, err := m.cfg.Peers.Dial(p)
		if err != nil {
			_, _ = fmt.Fprintf(run.log, "== %s is left out: %v\n", p.Node, err) // only people read the log
			continue
		}
		defer func() { _ = of.Close() }() // no request is under way on it
		sources = append(sources, of)
	}
	if len(b.Fetch.Peers) > 0 {
		snap, result, err := peer.Fetch(ctx, what.manifest, m.partsDir(b.Fetch.Digest), dir, peer.Options{Sources: sources, Lend: m.lend, Log: run.log})
		if err == nil {
			m.cfg.Log.Info("fetched a snapshot", "template", b.Template, "snapshot", what.id.String(), "fetched", result.Fetched, "found", result.Found, "lent", result.Lent)
			return true, snap.Close()
		}
		if progress = result.Fetched > 0; ctx.Err() != nil {
			return progress, err
		}
		if b.Fetch.Pack == "" {
			return progress, whyNotFetched(err)
		}
		_, _ = fmt.Fprintf(run.log, "== %v\n", err) // likewise
	}
	_, _ = fmt.Fprintf(run.log, "== pull %s\n", b.Fetch.Pack) // likewise
	snap, err := m.cfg.Peers.Pull(ctx, b.Fetch.Pack, dir, PullRequest{Lend: m.lend, Accept: func(got snapshot.Manifest) error {
		id, err := peer.IDOf(got)
		if err == nil && id != what.id {
			err = fmt.Errorf("the pack is of snapshot %s, not of %s", id, what.id)
		}
		return err
	}})
	if err != nil {
		return progress, err
	}
	return true, snap.Close()
}

// whyNotFetched tells failures of peers, after which the fetch is tried again,
// from other failures.
func whyNotFetched(err error) error {
	var missing *peer.MissingError
	switch {
	case errors.Is(err, peer.ErrLate): // the next attempt goes on with the parts that have come
		return fmt.Errorf("%w: %w", ErrInterrupted, err)
	case !errors.As(err, &missing):
		return err
	case missing.Busy: // it is tried until a peer serves it
		return sandbox.Errorf(sandbox.CodeCapacity, "the nodes that have the snapshot serve others").Because("%v", err)
	}
	return fmt.Errorf("%w: %w", ErrInterrupted, err)
}

// lend finds a template's snapshot that has a layer; it returns nil if there is
// no such snapshot.
func (m *Manager) lend(ref layer.Ref) *snapshot.Snapshot {
	dirs, err := filepath.Glob(filepath.Join(m.cfg.Dir, snapshotsDir, "*"))
	if err != nil {
		return nil
	}
	for _, dir := range dirs {
		manifest, err := snapshot.ReadManifest(dir)
		if err != nil || manifest.Private { // it is being made, or being removed
			continue
		}
		for _, has := range manifest.Layers() {
			if has != ref {
				continue
			}
			if snap, err := snapshot.Open(dir); err == nil {
				return snap
			}
		}
	}
	return nil
}
