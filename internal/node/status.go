package node

import (
	"maps"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// The status of pools and of the node changes with each sandbox. It is written to the
// journal, so that watchers learn of a change, with a resource version. The first change
// is written at once, and then all further ones together, at most every statusEvery.
const statusEvery = 200 * time.Millisecond

// poolRecord is the status of a pool, as it was written last.
type poolRecord struct {
	sandbox.Key
	sandbox.PoolStatus
}

// nodeRecord is the status of the node, as it was written last.
type nodeRecord struct {
	Reserved    uint64 `json:"reserved"`
	Sandboxes   int    `json:"sandboxes"`
	Hibernated  int    `json:"hibernated"`
	Checkpoints int    `json:"checkpoints"`
	Starts      int    `json:"starts"`
	Builds      int    `json:"builds"`
	// Left counts running sandboxes that a drain still has to hibernate, Problems
	// those that it could not.
	Left     int `json:"left,omitempty"`
	Problems int `json:"problems,omitempty"`
}

var (
	poolStatuses = journal.Collection[poolRecord]("pool-statuses")
	nodeRecords  = journal.Collection[nodeRecord]("node")
)

// nodeKey is the key of the only nodeRecord.
const nodeKey = "status"

// noticeStatus is called when the status of a pool or of the node may have changed. It
// does not wait.
func (m *Manager) noticeStatus() {
	select {
	case m.statusChanged <- struct{}{}:
	default:
	}
}

// recordStatuses keeps the journal up to date with the status of the pools and
// the node.
func (m *Manager) recordStatuses() {
	written := map[sandbox.Key]sandbox.PoolStatus{}
	var node nodeRecord
	for {
		select {
		case <-m.statusChanged:
		case <-m.ctx.Done():
			return
		}
		if err := m.recordStatus(written, &node); err != nil && m.ctx.Err() == nil {
			m.cfg.Log.Error("write what pools and the node have", "error", err)
			m.noticeStatus()
		}
		select {
		case <-time.After(statusEvery):
		case <-m.ctx.Done():
			return
		}
	}
}

// recordStatus writes the statuses that have changed since they were written.
func (m *Manager) recordStatus(written map[sandbox.Key]sandbox.PoolStatus, node *nodeRecord) error {
	now := m.poolsNow()
	maps.DeleteFunc(written, func(k sandbox.Key, _ sandbox.PoolStatus) bool { _, there := now[k]; return !there })
	maps.DeleteFunc(now, func(k sandbox.Key, st sandbox.PoolStatus) bool { old, ok := written[k]; return ok && old == st })
	load := m.load()
	if len(now) == 0 && load == *node {
		return nil
	}
	err := m.db.Update(func(tx *journal.Tx) error {
		for k, st := range now {
			if _, there := pools.Version(tx, k.String()); !there {
				continue // it was deleted in the meantime
			}
			if err := poolStatuses.Put(tx, k.String(), poolRecord{k, st}); err != nil {
				return err
			}
		}
		if load == *node {
			return nil
		}
		return nodeRecords.Put(tx, nodeKey, load)
	})
	if err == nil {
		maps.Copy(written, now)
		*node = load
	}
	return err
}

// poolsNow returns the status of all pools.
func (m *Manager) poolsNow() map[sandbox.Key]sandbox.PoolStatus {
	m.mu.Lock()
	running := maps.Clone(m.pools)
	m.mu.Unlock()
	out := make(map[sandbox.Key]sandbox.PoolStatus, len(running))
	for k, p := range running {
		out[k] = p.status()
	}
	return out
}

// load returns the status of the node.
func (m *Manager) load() nodeRecord {
	n := nodeRecord{Reserved: m.capacity.reserved(), Starts: m.turns.waiting(), Builds: m.buildTurns.waiting()}
	var running int
	n.Sandboxes, running, n.Hibernated, n.Checkpoints = m.tally.live()
	if c := m.cordon.shown(running); c != nil {
		n.Left, n.Problems = c.Left, len(c.Problems)
	}
	return n
}
