package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

// openHeld opens a snapshot for a machine, and lists the parts that the machine
// will hold in memory.
func (m *Manager) openHeld(dir, owner string) (*snapshot.Snapshot, []sandbox.Held, error) {
	snap, err := snapshot.Open(dir, snapshot.WithKey(m.cfg.Key))
	if err != nil {
		return nil, nil, err
	}
	held, err := heldBy(snap, owner)
	if err != nil {
		_ = snap.Close() // only read
		return nil, nil, err
	}
	return snap, held, nil
}

// ownBytes is the size on disk of an image or a checkpoint, without the layers
// that it shares with templates of the node. It counts in the quota of its
// namespace.
func (m *Manager) ownBytes(dir string) (uint64, error) {
	shared, err := m.templateLayers()
	if err != nil {
		return 0, err
	}
	return snapshot.BytesBeside(dir, func(digest string) bool { return shared[digest] })
}

// templateLayers returns the layers of all templates, by digest.
func (m *Manager) templateLayers() (map[string]bool, error) {
	templates, err := filepath.Glob(filepath.Join(m.cfg.Dir, snapshotsDir, "*"))
	if err != nil {
		return nil, err
	}
	shared := map[string]bool{}
	for _, t := range templates {
		manifest, err := snapshot.ReadManifest(t)
		if err != nil {
			continue // it is being made, or being removed
		}
		for _, ref := range manifest.Layers() {
			shared[ref.Digest.String()] = true
		}
	}
	return shared, nil
}

// dropHeld frees memory that no machine holds any more.
func (m *Manager) dropHeld(ids []string) {
	if err := m.cfg.Engine.Drop(ids); err != nil {
		m.cfg.Log.Error("free memory that is not used", "error", err)
	}
}

// count sets kept to the size of a folder and counts it in the quota of a
// namespace. If the quota refuses it, kept is 0.
func (m *Manager) count(n sandbox.Namespace, dir string, kept *uint64) error {
	bytes, err := m.ownBytes(dir)
	if err == nil {
		err = m.capacity.store(n, bytes)
	}
	if err == nil {
		*kept = bytes
	}
	return err
}

// beginCheckpoint makes sure that there is room for a checkpoint of a sandbox. A
// running sandbox has two copies in memory until its checkpoint is on disk. The
// caller calls done then.
func (m *Manager) beginCheckpoint(ctx context.Context, b *member) (done func(), err error) {
	s := b.now()
	if err := errors.Join(m.room.admit(), m.capacity.store(s.Namespace, 0)); err != nil {
		return nil, err
	}
	stored := func() {}
	if b.machine != nil { // otherwise it shares the layers that are on disk
		if stored, err = m.admitCapture(ctx, b.machine); err != nil {
			return nil, err
		}
	}
	if s.State != sandbox.Running {
		return stored, nil
	}
	if err := m.reserve(s.Namespace, s.Memory); err != nil {
		stored()
		return nil, fmt.Errorf("there is a second copy of a running sandbox in memory until it is written, pause %s first: %w", s.Name, err)
	}
	return func() {
		stored()
		m.capacity.release(s.Namespace, s.Memory)
		m.refill()
	}, nil
}

// measurer measures stored data whose size the journal lacks, because an earlier
// version has stored it. A size of 0 means that it is unknown: no image and no
// checkpoint is empty.
type measurer struct {
	manager *Manager
	shared  func() (map[string]bool, error)
}

func (m *Manager) measurer() measurer { return measurer{m, sync.OnceValues(m.templateLayers)} }

func (m measurer) image(s *sandbox.Sandbox) (err error) {
	if (s.State == sandbox.Hibernated || s.State == sandbox.Resuming) && s.Kept == 0 {
		s.Kept, err = m.measure(m.manager.asleepDir(s.Asleep))
	}
	return err
}

func (m measurer) checkpoints(tx *journal.Tx) error {
	var unknown []sandbox.Checkpoint
	err := checkpoints.Each(tx, "", func(_ string, c sandbox.Checkpoint) error {
		if c.Kept == 0 {
			unknown = append(unknown, c)
		}
		return nil
	})
	for _, c := range unknown {
		var measureErr error
		c.Kept, measureErr = m.measure(m.manager.checkpointDir(c.ID))
		err = errors.Join(err, measureErr, checkpoints.Put(tx, c.String(), c))
	}
	return err
}

func (m measurer) measure(dir string) (uint64, error) {
	shared, err := m.shared()
	if err != nil {
		return 0, err
	}
	bytes, err := snapshot.BytesBeside(dir, func(digest string) bool { return shared[digest] })
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil // its next user gets the error
	}
	return bytes, err
}

// recoverStorage counts the bytes of checkpoints and builds on disk. The images of
// hibernated sandboxes are counted where the sandboxes are adopted.
func (m *Manager) recoverStorage() error {
	return m.db.View(func(tx *journal.Tx) error {
		err := checkpoints.Each(tx, "", func(_ string, c sandbox.Checkpoint) error {
			m.capacity.keep(c.Namespace, c.Kept)
			return nil
		})
		return errors.Join(err, builds.Each(tx, "", func(_ string, b sandbox.Build) error {
			if b.Counts() {
				m.capacity.keep(b.Template.Namespace, b.Kept, b.Shares()...)
			}
			return nil
		}))
	})
}
