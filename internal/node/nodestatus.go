package node

import (
	"context"
	"errors"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

// Node returns the status of the node. Its cost does not depend on the number of objects:
// each snapshot and checkpoint is read only once, by the first call.
func (m *Manager) Node(context.Context) (sandbox.NodeStatus, error) {
	load := m.load()
	n := sandbox.NodeStatus{
		ID: m.id, Boot: m.cfg.Boot, State: m.db.ID(), Engine: m.cfg.Engine.Name(),
		CPU:      sandbox.CPU{Profile: m.processor.Profile, Vendor: m.processor.Vendor, Features: m.processor.Features},
		Capacity: m.capacity.capacity, Reserved: load.Reserved,
		Sandboxes: load.Sandboxes, Hibernated: load.Hibernated, Checkpoints: load.Checkpoints,
		StartsWaiting: load.Starts, BuildsWaiting: load.Builds, Cordon: m.cordon.shown(load.Left),
	}
	err := m.db.View(func(tx *journal.Tx) error {
		n.ResourceVersion, _ = nodeRecords.Version(tx, nodeKey)
		cordoned, _ := cordons.Version(tx, nodeKey)
		n.ResourceVersion = max(n.ResourceVersion, cordoned)
		return nil
	})
	if err == nil {
		n.Snapshots, err = m.tally.nodeSnapshots(m.digest)
	}
	if err == nil {
		n.Images, err = m.imageDigests()
	}
	if n.Cordon != nil && n.Cordon.Drain && err == nil {
		n.Cordon.Sealed, err = m.sealed()
	}
	if err == nil {
		n.CheckpointBytes, err = m.CheckpointBytes()
	}
	return n, err
}

// sealed counts the snapshots on disk that hold secrets.
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

// digest returns the digest of a template's snapshot.
func (m *Manager) digest(id sandbox.ID) (string, error) {
	snap, err := snapshot.Open(m.snapshotDir(id))
	if err != nil {
		return "", err
	}
	return snap.ID().String(), snap.Close()
}
