package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

var checkpoints = journal.Collection[sandbox.Checkpoint]("checkpoints")

// Checkpoint writes a sandbox to disk under a name. The sandbox keeps its
// state: running, paused or hibernated.
func (m *Manager) Checkpoint(ctx context.Context, r sandbox.CheckpointRequest) (c sandbox.CheckpointSize, replayed bool, err error) {
	c, replayed, err = doOnce(ctx, m, r.Once, checkpointIn, func(also record[sandbox.CheckpointSize]) (sandbox.CheckpointSize, error) {
		return m.checkpoint(ctx, r, also)
	})
	if !replayed {
		return c, false, err
	}
	// A kept answer has no resource version.
	if now, nowErr := m.CheckpointOf(ctx, c.Key); nowErr == nil && now.ID == c.ID {
		c = now
	}
	return c, true, err
}

func (m *Manager) checkpoint(ctx context.Context, r sandbox.CheckpointRequest, also record[sandbox.CheckpointSize]) (out sandbox.CheckpointSize, err error) {
	k, source := r.Key, r.Source
	if err := m.beginMaking(); err != nil {
		return out, err
	}
	_, err = m.with(ctx, sandbox.Key{Namespace: k.Namespace, Name: source}, []sandbox.Precondition{r.When}, func(ctx context.Context, b *member) error {
		if err := errors.Join(m.mayCopy(ctx, b.now(), "checkpoint"), b.answers()); err != nil {
			return err
		}
		release, err := m.captureTurns.take(ctx, k.Namespace)
		if err != nil {
			return fmt.Errorf("checkpoint sandbox %s: %w", source, err)
		}
		defer release()
		done, err := m.beginCheckpoint(ctx, b)
		if err != nil {
			return err
		}
		defer done()
		c, err := m.storeCheckpoint(ctx, b, k)
		if err != nil {
			return err
		}
		err = m.db.Update(func(tx *journal.Tx) error {
			return errors.Join(checkpoints.Write(tx, k.String(), &c.Checkpoint), also.write(tx, c))
		})
		if err != nil {
			return errors.Join(fmt.Errorf("checkpoint sandbox %s: %w", source, err), m.undoCheckpoint(c.Checkpoint))
		}
		out = c
		return nil
	})
	return out, err
}

// storeCheckpoint writes a sandbox to disk; the caller has its turn. Afterwards the checkpoint
// is complete, but still an intent in the journal.
func (m *Manager) storeCheckpoint(ctx context.Context, b *member, k sandbox.Key) (out sandbox.CheckpointSize, err error) {
	c, err := m.enlistCheckpoint(k, b.now())
	if err != nil {
		return out, err
	}
	dir := m.checkpointDir(c.ID)
	if err = b.writeCheckpoint(ctx, dir); err == nil {
		err = m.count(k.Namespace, dir, &c.Kept)
	}
	if err == nil {
		c.Phase = sandbox.PhaseReady
		if b.machine != nil { // otherwise it has the lineage from its hibernation
			c.Of.Egress.Lineage = captured(b.machine)
		}
		out, err = sized(m, c)
	}
	if err != nil {
		return out, errors.Join(fmt.Errorf("checkpoint sandbox %s: %w", b.key.Name, err), m.undoCheckpoint(c))
	}
	return out, nil
}

// undoCheckpoint undoes storeCheckpoint.
func (m *Manager) undoCheckpoint(c sandbox.Checkpoint) error {
	m.capacity.discard(c.Namespace, c.Kept)
	return errors.Join(
		m.db.Update(func(tx *journal.Tx) error { return checkpoints.Delete(tx, c.String()) }),
		m.removeSnapshot(m.checkpointDir(c.ID)))
}

// enlistCheckpoint takes the name and writes the intent.
func (m *Manager) enlistCheckpoint(k sandbox.Key, of sandbox.Sandbox) (sandbox.Checkpoint, error) {
	of.Machine, of.Boot, of.Asleep = "", "", ""
	of.Layers, of.Live, of.Kept, of.Unresponsive = nil, nil, 0, ""
	c := sandbox.Checkpoint{Key: k, ID: sandbox.NewID(), Phase: sandbox.PhasePending, Created: time.Now().UTC(), Of: of}
	err := m.db.Update(func(tx *journal.Tx) error {
		if _, found, err := checkpoints.Get(tx, k.String()); err != nil {
			return err
		} else if found {
			return sandbox.Errorf(sandbox.CodeExists, "checkpoint %s exists already in namespace %s", k.Name, k.Namespace).
				Try("Choose another name, or delete it with `agentrun checkpoint rm %s`", k.Name)
		}
		return checkpoints.Put(tx, k.String(), c)
	})
	return c, err
}

// writeCheckpoint writes the sandbox to a new folder, sealed if it holds
// secrets. The caller has the turn.
func (b *member) writeCheckpoint(ctx context.Context, dir string) error {
	last := b.now()
	var snap *snapshot.Snapshot
	var err error
	if last.State == sandbox.Hibernated {
		snap, err = b.manager.cloneSnapshot(b.manager.asleepDir(last.Asleep), dir)
	} else {
		snap, err = b.machine.Snapshot(ctx, dir, b.manager.sealing(last)...)
	}
	if err != nil {
		return err
	}
	return snap.Close()
}

// cloneSnapshot copies a snapshot to another folder.
func (m *Manager) cloneSnapshot(from, to string) (_ *snapshot.Snapshot, err error) {
	snap, err := snapshot.Open(from, snapshot.WithKey(m.cfg.Key))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, snap.Close()) }()
	return snap.Clone(to)
}

// settleCheckpoints forgets checkpoints whose request was never answered.
func settleCheckpoints(tx *journal.Tx) error {
	var unfinished []sandbox.Checkpoint
	err := checkpoints.Each(tx, "", func(_ string, c sandbox.Checkpoint) error {
		if !c.Ready() {
			unfinished = append(unfinished, c)
		}
		return nil
	})
	for _, c := range unfinished {
		err = errors.Join(err, checkpoints.Delete(tx, c.String()))
	}
	return err
}

// sized adds the size of a checkpoint.
func sized(m *Manager, c sandbox.Checkpoint) (sandbox.CheckpointSize, error) {
	size, err := new(snapshot.Usage).Add(m.checkpointDir(c.ID))
	return sandbox.CheckpointSize{Checkpoint: c, Size: fromSize(size)}, err
}

// readyCheckpoint finds a complete checkpoint.
func readyCheckpoint(tx *journal.Tx, k sandbox.Key) (sandbox.Checkpoint, error) {
	c, found, err := checkpoints.Get(tx, k.String())
	if err == nil && (!found || !c.Ready()) {
		err = sandbox.NotFound(sandbox.KindCheckpoint, k)
	}
	return c, err
}

// CheckpointOf returns a checkpoint.
func (m *Manager) CheckpointOf(_ context.Context, k sandbox.Key) (sandbox.CheckpointSize, error) {
	var c sandbox.Checkpoint
	err := m.db.View(func(tx *journal.Tx) (err error) {
		c, err = readyCheckpoint(tx, k)
		return err
	})
	if err != nil {
		return sandbox.CheckpointSize{}, err
	}
	return sized(m, c)
}

// Checkpoints lists checkpoints by name.
func (m *Manager) Checkpoints(_ context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.CheckpointSize, error) {
	list, err := listIf(m, checkpoints, n, p, ownVersion, sandbox.Checkpoint.Ready)
	if err != nil {
		return nil, err
	}
	out := make([]sandbox.CheckpointSize, 0, len(list))
	for _, c := range list {
		one, err := sized(m, c)
		if err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	return out, nil
}

// DeleteCheckpoint deletes a checkpoint, unless a sandbox is being restored
// from it. Restored sandboxes stay.
func (m *Manager) DeleteCheckpoint(_ context.Context, k sandbox.Key, when ...sandbox.Precondition) error {
	if err := m.begin(); err != nil {
		return err
	}
	c, err := m.dropCheckpoint(k, when)
	if err != nil {
		return err
	}
	// If the daemon is killed here, the next one sweeps the files.
	err = m.removeSnapshot(m.checkpointDir(c.ID))
	m.capacity.discard(k.Namespace, c.Kept)
	return err
}

// dropCheckpoint removes a checkpoint from the journal. From then on no sandbox
// is restored from it.
func (m *Manager) dropCheckpoint(k sandbox.Key, when []sandbox.Precondition) (c sandbox.Checkpoint, err error) {
	m.mu.Lock()
	switch n := m.restoring[k]; {
	case n > 0:
		m.mu.Unlock()
		return c, sandbox.Errorf(sandbox.CodeConflict, "checkpoint %s is in use", k.Name).
			Because("%d sandboxes are being restored from it", n).Try("Try again when they are there")
	case n < 0:
		m.mu.Unlock()
		return c, sandbox.NotFound(sandbox.KindCheckpoint, k) // another call is deleting it
	}
	m.restoring[k] = -1
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.restoring, k)
	}()
	err = m.db.Update(func(tx *journal.Tx) error {
		if c, err = readyCheckpoint(tx, k); err != nil {
			return err
		}
		of := sandbox.Identity{Kind: sandbox.KindCheckpoint, Key: k, ID: c.ID, Version: c.ResourceVersion}
		if err := of.Meets(when...); err != nil {
			return err
		}
		return checkpoints.Delete(tx, k.String())
	})
	return c, err
}

// CheckpointBytes is the size on disk of all checkpoints of the node together,
// with shared data counted once.
func (m *Manager) CheckpointBytes() (uint64, error) { return m.tally.checkpointBytes(m.checkpointDir) }
