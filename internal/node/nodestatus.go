package node

import (
	"context"
	"errors"
	"io/fs"
	"maps"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

// Node looks at the node.
func (m *Manager) Node(context.Context) (sandbox.NodeStatus, error) {
	load, err := m.load()
	if err != nil {
		return sandbox.NodeStatus{}, err
	}
	n := sandbox.NodeStatus{
		ID: m.id, Boot: m.cfg.Boot, State: m.db.ID(), Engine: m.cfg.Engine.Name(),
		CPU:      sandbox.CPU{Profile: m.processor.Profile, Vendor: m.processor.Vendor, Features: m.processor.Features},
		Capacity: m.capacity.capacity, Reserved: load.Reserved,
		Sandboxes: load.Sandboxes, Hibernated: load.Hibernated, Checkpoints: load.Checkpoints,
		StartsWaiting: load.Starts, BuildsWaiting: load.Builds, Cordon: m.cordon.shown(load.Left),
	}
	var built []sandbox.Build
	err = m.db.View(func(tx *journal.Tx) error {
		n.ResourceVersion, _ = nodeRecords.Version(tx, nodeKey)
		cordoned, _ := cordons.Version(tx, nodeKey)
		n.ResourceVersion = max(n.ResourceVersion, cordoned)
		return builds.Each(tx, "", func(_ string, b sandbox.Build) error {
			if b.Phase == sandbox.PhaseReady {
				built = append(built, b)
			}
			return nil
		})
	})
	if n.Cordon != nil && n.Cordon.Drain && err == nil {
		n.Cordon.Sealed, err = m.sealed()
	}
	m.forgetDigests(built)
	for _, b := range built {
		digest, digestErr := m.digest(b.Snapshot)
		if errors.Is(digestErr, fs.ErrNotExist) {
			continue // it was deleted meanwhile
		}
		err = errors.Join(err, digestErr)
		n.Snapshots = append(n.Snapshots, sandbox.NodeSnapshot{
			Template: b.Template, Revision: b.Revision, Stage: b.Stage, Image: b.Image, Digest: digest,
		})
	}
	if err == nil {
		n.CheckpointBytes, err = m.CheckpointBytes()
	}
	return n, err
}

// sealed counts what holds secrets on disk.
func (m *Manager) sealed() (n int, err error) {
	err = m.db.View(func(tx *journal.Tx) error {
		return errors.Join(
			sandboxes.Each(tx, "", func(_ string, s sandbox.Sandbox) error {
				if s.State == sandbox.Hibernated && s.HoldsSecrets() {
					n++
				}
				return nil
			}),
			checkpoints.Each(tx, "", func(_ string, c sandbox.Checkpoint) error {
				if c.Of.HoldsSecrets() {
					n++
				}
				return nil
			}))
	})
	return n, err
}

// digest is that of a template's snapshot. It is read once.
func (m *Manager) digest(id sandbox.ID) (string, error) {
	m.mu.Lock()
	known := m.digests[id]
	m.mu.Unlock()
	if known != "" {
		return known, nil
	}
	snap, err := snapshot.Open(m.snapshotDir(id))
	if err != nil {
		return "", err
	}
	known = snap.ID().String()
	if err := snap.Close(); err != nil {
		return "", err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.digests[id] = known
	return known, nil
}

// forgetDigests forgets those of snapshots that are not there any more.
func (m *Manager) forgetDigests(built []sandbox.Build) {
	there := map[sandbox.ID]bool{}
	for _, b := range built {
		there[b.Snapshot] = true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	maps.DeleteFunc(m.digests, func(id sandbox.ID, _ string) bool { return !there[id] })
}
