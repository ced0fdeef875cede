package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/storage/snapshot"
)

// Checkpoint is a sandbox as it was at one instant, on disk. It needs neither
// the sandbox nor its template, and any number of sandboxes can be made of it.
type Checkpoint struct {
	Key
	// ID is never used again; it is the folder's name, too.
	ID ID `json:"id"`
	// Phase is Pending while it is being written: an intent.
	Phase   Phase     `json:"phase"`
	Created time.Time `json:"created"`
	// Of is the sandbox as it was, without what it ran on.
	Of Sandbox `json:"of"`
	// Kept is what it takes on disk beyond its template, in bytes.
	Kept uint64 `json:"kept,omitempty"`
}

// CheckpointSize is a checkpoint and what it takes on disk, in bytes. What it
// has in common with templates, sandboxes and other checkpoints is not part of
// Unshared, which is what deleting it frees.
type CheckpointSize struct {
	Checkpoint
	snapshot.Size
}

var checkpoints = journal.Collection[Checkpoint]("checkpoints")

// Checkpoint writes a sandbox to disk under a name. The sandbox goes on; one
// that is paused or hibernated stays so.
func (m *Manager) Checkpoint(ctx context.Context, k Key, source Name) (CheckpointSize, error) {
	return m.checkpoint(ctx, k, source, nil)
}

func (m *Manager) checkpoint(ctx context.Context, k Key, source Name, also record[CheckpointSize]) (out CheckpointSize, err error) {
	_, err = m.with(ctx, Key{k.Namespace, source}, func(b *member) error {
		if err := m.mayCopy(ctx, b.now(), "checkpoint"); err != nil {
			return err
		}
		done, err := m.beginCheckpoint(b.now())
		if err != nil {
			return err
		}
		defer done()
		c, err := m.enlistCheckpoint(k, b.now())
		if err != nil {
			return err
		}
		dir := m.checkpointDir(c.ID)
		if err = b.writeCheckpoint(ctx, dir); err == nil {
			err = m.count(k.Namespace, dir, &c.Kept)
		}
		if err == nil {
			c.Phase = PhaseReady
			if out, err = sized(m, c); err == nil {
				err = m.db.Update(func(tx *journal.Tx) error {
					return errors.Join(checkpoints.Put(tx, k.String(), c), also.write(tx, out))
				})
			}
		}
		if err != nil {
			m.capacity.discard(k.Namespace, c.Kept)
			return errors.Join(fmt.Errorf("checkpoint sandbox %s: %w", source, err),
				m.db.Update(func(tx *journal.Tx) error { return checkpoints.Delete(tx, k.String()) }),
				m.removeSnapshot(dir))
		}
		return nil
	})
	return out, err
}

// enlistCheckpoint takes the name and writes the intent.
func (m *Manager) enlistCheckpoint(k Key, of Sandbox) (Checkpoint, error) {
	of.Machine, of.Boot, of.Image = "", "", ""
	of.Layers, of.Live, of.Kept = nil, nil, 0
	c := Checkpoint{Key: k, ID: newID(), Phase: PhasePending, Created: time.Now().UTC(), Of: of}
	err := m.db.Update(func(tx *journal.Tx) error {
		if _, found, err := checkpoints.Get(tx, k.String()); err != nil {
			return err
		} else if found {
			return Errorf(CodeExists, "checkpoint %s exists already in namespace %s", k.Name, k.Namespace).
				Try("Choose another name, or delete it with `agentrun checkpoint rm %s`", k.Name)
		}
		return checkpoints.Put(tx, k.String(), c)
	})
	return c, err
}

// writeCheckpoint writes what the sandbox is to a new folder, sealed if it holds
// secrets. The caller has the turn.
func (b *member) writeCheckpoint(ctx context.Context, dir string) error {
	last := b.now()
	var snap *snapshot.Snapshot
	var err error
	if last.State == Hibernated {
		snap, err = b.manager.cloneSnapshot(b.manager.imageDir(last.Image), dir)
	} else {
		snap, err = b.machine.Snapshot(ctx, dir, b.manager.sealing(last)...)
	}
	if err != nil {
		return err
	}
	return snap.Close()
}

// cloneSnapshot makes another folder of a snapshot.
func (m *Manager) cloneSnapshot(from, to string) (_ *snapshot.Snapshot, err error) {
	snap, err := snapshot.Open(from, snapshot.WithKey(m.cfg.Key))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, snap.Close()) }()
	return snap.Clone(to)
}

// settleCheckpoints forgets checkpoints that never had an answer.
func settleCheckpoints(tx *journal.Tx) error {
	var unfinished []Checkpoint
	err := checkpoints.Each(tx, "", func(_ string, c Checkpoint) error {
		if !c.ready() {
			unfinished = append(unfinished, c)
		}
		return nil
	})
	for _, c := range unfinished {
		err = errors.Join(err, checkpoints.Delete(tx, c.String()))
	}
	return err
}

func (c Checkpoint) ready() bool { return c.Phase == PhaseReady }

// sized adds what a checkpoint takes.
func sized(m *Manager, c Checkpoint) (CheckpointSize, error) {
	size, err := new(snapshot.Usage).Add(m.checkpointDir(c.ID))
	return CheckpointSize{c, size}, err
}

// readyCheckpoint finds a checkpoint that is complete.
func readyCheckpoint(tx *journal.Tx, k Key) (Checkpoint, error) {
	c, found, err := checkpoints.Get(tx, k.String())
	if err == nil && (!found || !c.ready()) {
		err = notFound(KindCheckpoint, k)
	}
	return c, err
}

// CheckpointOf returns a checkpoint.
func (m *Manager) CheckpointOf(k Key) (CheckpointSize, error) {
	var c Checkpoint
	err := m.db.View(func(tx *journal.Tx) (err error) {
		c, err = readyCheckpoint(tx, k)
		return err
	})
	if err != nil {
		return CheckpointSize{}, err
	}
	return sized(m, c)
}

// Checkpoints lists checkpoints by name.
func (m *Manager) Checkpoints(n Namespace, p Page) ([]CheckpointSize, error) {
	list, err := listIf(m, checkpoints, n, p, Checkpoint.ready)
	if err != nil {
		return nil, err
	}
	out := make([]CheckpointSize, 0, len(list))
	for _, c := range list {
		one, err := sized(m, c)
		if err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	return out, nil
}

// DeleteCheckpoint deletes a checkpoint that nobody is being restored from.
// Sandboxes that were stay.
func (m *Manager) DeleteCheckpoint(k Key) error {
	if err := m.begin(); err != nil {
		return err
	}
	c, err := m.dropCheckpoint(k)
	if err != nil {
		return err
	}
	// Whoever is killed here leaves what the next daemon sweeps.
	err = m.removeSnapshot(m.checkpointDir(c.ID))
	m.capacity.discard(k.Namespace, c.Kept)
	return err
}

// dropCheckpoint takes a checkpoint out of the journal: none is restored from
// then on.
func (m *Manager) dropCheckpoint(k Key) (c Checkpoint, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	err = m.db.Update(func(tx *journal.Tx) error {
		if c, err = readyCheckpoint(tx, k); err != nil {
			return err
		}
		if n := m.restoring[c.ID]; n > 0 {
			return Errorf(CodeConflict, "checkpoint %s is in use", k.Name).
				Because("%d sandboxes are being restored from it", n).Try("Try again when they are there")
		}
		return checkpoints.Delete(tx, k.String())
	})
	return c, err
}

// CheckpointBytes is what all checkpoints of the node take on disk together,
// what they share counted once.
func (m *Manager) CheckpointBytes() (uint64, error) {
	var all []Checkpoint
	err := m.db.View(func(tx *journal.Tx) error {
		return checkpoints.Each(tx, "", func(_ string, c Checkpoint) error {
			all = append(all, c)
			return nil
		})
	})
	var u snapshot.Usage
	for _, c := range all {
		_, addErr := u.Add(m.checkpointDir(c.ID))
		err = errors.Join(err, addErr)
	}
	return u.Bytes, err
}
