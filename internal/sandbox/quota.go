package sandbox

import (
	"fmt"

	"agentrun.dev/internal/node/journal"
)

// Quota bounds what a namespace may use; 0 is no bound.
type Quota struct {
	Namespace Namespace `json:"namespace"`
	// Memory is what the machines of the namespace may reserve together, those
	// that wait in pools included, in bytes. A hibernated sandbox reserves none.
	Memory uint64 `json:"memory,omitempty"`
	// Sandboxes is how many there may be that have not ended, hibernated ones
	// included. What waits in pools is none yet.
	Sandboxes int `json:"sandboxes,omitempty"`
	// Storage is what hibernated sandboxes and checkpoints of the namespace may take
	// on disk together, beyond their templates, in bytes.
	Storage uint64 `json:"storage,omitempty"`
}

// QuotaUse is what a namespace uses of its quota.
type QuotaUse struct {
	Quota
	UsedMemory    uint64
	UsedSandboxes int
	UsedStorage   uint64
}

var quotas = journal.Collection[Quota]("quotas")

// SetQuota bounds a namespace from now on. What it has already stays.
func (m *Manager) SetQuota(q Quota) (QuotaUse, error) {
	if err := m.begin(); err != nil {
		return QuotaUse{}, err
	}
	if q.Sandboxes < 0 {
		return QuotaUse{}, invalid("sandboxes", "%d is negative", q.Sandboxes)
	}
	// Two at once are in memory in the order in which they are in the journal.
	m.quotaTurn.Lock()
	defer m.quotaTurn.Unlock()
	err := m.db.Update(func(tx *journal.Tx) error {
		if q == (Quota{Namespace: q.Namespace}) {
			return quotas.Delete(tx, string(q.Namespace))
		}
		return quotas.Put(tx, string(q.Namespace), q)
	})
	if err != nil {
		return QuotaUse{}, fmt.Errorf("set the quota of namespace %s: %w", q.Namespace, err)
	}
	m.capacity.setQuotas(map[Namespace]Quota{q.Namespace: q})
	m.refill()
	return m.QuotaOf(q.Namespace)
}

// QuotaOf is the quota of a namespace and what it uses of it.
func (m *Manager) QuotaOf(n Namespace) (QuotaUse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	use := m.capacity.quota(n)
	use.UsedSandboxes = m.countSandboxes(n)
	return use, nil
}

// countSandboxes counts those of a namespace that have not ended. It is called
// with the mutex.
func (m *Manager) countSandboxes(n Namespace) (count int) {
	for k := range m.names {
		if k.Namespace == n {
			count++
		}
	}
	return count
}

// admit refuses one more sandbox of a namespace that has as many as it may have.
// It is called with the mutex, which its caller holds until the sandbox counts.
func (m *Manager) admit(n Namespace) error {
	q := m.capacity.quota(n)
	if q.Sandboxes == 0 {
		return nil
	}
	have := m.countSandboxes(n)
	if have < q.Sandboxes {
		return nil
	}
	return Errorf(CodeCapacity, "the quota of namespace %s has no room for another sandbox", n).
		Because("it has %d of %d sandboxes, hibernated ones included", have, q.Sandboxes).
		Try("End sandboxes of namespace %s, or raise its quota", n)
}

// recoverQuotas reads the quotas from the journal.
func (m *Manager) recoverQuotas() error {
	found := map[Namespace]Quota{}
	err := m.db.View(func(tx *journal.Tx) error {
		return quotas.Each(tx, "", func(_ string, q Quota) error {
			found[q.Namespace] = q
			return nil
		})
	})
	m.capacity.setQuotas(found)
	return err
}
