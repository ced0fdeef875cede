package node

import (
	"context"
	"fmt"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

var quotas = journal.Collection[sandbox.Quota]("quotas")

// SetQuota sets the limits of a namespace. Objects beyond them stay.
func (m *Manager) SetQuota(ctx context.Context, q sandbox.Quota) (sandbox.QuotaUse, error) {
	if err := m.begin(); err != nil {
		return sandbox.QuotaUse{}, err
	}
	if q.Sandboxes < 0 {
		return sandbox.QuotaUse{}, sandbox.Invalid("sandboxes", "%d is negative", q.Sandboxes)
	}
	// So concurrent calls take effect in memory in the same order as in the
	// journal.
	m.quotaTurn.Lock()
	defer m.quotaTurn.Unlock()
	err := m.db.Update(func(tx *journal.Tx) error {
		if q == (sandbox.Quota{Namespace: q.Namespace}) {
			return quotas.Delete(tx, string(q.Namespace))
		}
		return quotas.Put(tx, string(q.Namespace), q)
	})
	if err != nil {
		return sandbox.QuotaUse{}, fmt.Errorf("set the quota of namespace %s: %w", q.Namespace, err)
	}
	m.capacity.setQuotas(map[sandbox.Namespace]sandbox.Quota{q.Namespace: q})
	m.refill()
	return m.QuotaOf(ctx, q.Namespace)
}

// QuotaOf returns the quota of a namespace and how much of it is used.
func (m *Manager) QuotaOf(_ context.Context, n sandbox.Namespace) (sandbox.QuotaUse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	use := m.capacity.quota(n)
	use.UsedSandboxes = m.roster.count(n)
	return use, nil
}

// admit refuses one more sandbox for a namespace whose quota is full. The caller
// holds the mutex until the sandbox counts.
func (m *Manager) admit(n sandbox.Namespace) error {
	q := m.capacity.quota(n)
	if q.Sandboxes == 0 {
		return nil
	}
	have := m.roster.count(n)
	if have < q.Sandboxes {
		return nil
	}
	return sandbox.Errorf(sandbox.CodeCapacity, "the quota of namespace %s has no room for another sandbox", n).
		Because("it has %d of %d sandboxes, hibernated ones included", have, q.Sandboxes).
		Try("End sandboxes of namespace %s, or raise its quota", n)
}

// recoverQuotas reads the quotas from the journal.
func (m *Manager) recoverQuotas() error {
	found := map[sandbox.Namespace]sandbox.Quota{}
	err := m.db.View(func(tx *journal.Tx) error {
		return quotas.Each(tx, "", func(_ string, q sandbox.Quota) error {
			found[q.Namespace] = q
			return nil
		})
	})
	m.capacity.setQuotas(found)
	return err
}
