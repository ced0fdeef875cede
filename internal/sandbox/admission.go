package sandbox

import (
	"maps"
	"sync"
)

// admission counts the memory that machines may use, of all and of each
// namespace.
type admission struct {
	capacity uint64

	mu     sync.Mutex // protects all following fields
	used   uint64
	spaces map[Namespace]uint64 // what each uses, without those that use nothing
	quotas map[Namespace]Quota
}

func newAdmission(capacity uint64) *admission {
	return &admission{capacity: capacity, spaces: map[Namespace]uint64{}, quotas: map[Namespace]Quota{}}
}

// reserve takes bytes for a namespace, or refuses.
func (a *admission) reserve(n Namespace, bytes uint64) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if most, used := a.quotas[n].Memory, a.spaces[n]; most > 0 && bytes > most-min(used, most) {
		return Errorf(CodeCapacity, "the quota of namespace %s has no room for a sandbox of %s", n, mebibytes(bytes)).
			Because("%s of its %s of memory are reserved", mebibytes(used), mebibytes(most)).
			Try("End or hibernate sandboxes of namespace %s, make its pools smaller, or raise its quota", n)
	}
	if bytes > a.capacity-min(a.used, a.capacity) {
		return Errorf(CodeCapacity, "there is no room for a sandbox of %s", mebibytes(bytes)).
			Because("%s of %s are reserved", mebibytes(a.used), mebibytes(a.capacity)).
			Try("End or hibernate sandboxes, or make pools smaller")
	}
	a.add(n, bytes)
	return nil
}

// take reserves without asking: what runs already uses its memory.
func (a *admission) take(n Namespace, bytes uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.add(n, bytes)
}

func (a *admission) add(n Namespace, bytes uint64) {
	a.used += bytes
	a.spaces[n] += bytes
}

func (a *admission) release(n Namespace, bytes uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.used -= bytes
	if a.spaces[n] -= bytes; a.spaces[n] == 0 {
		delete(a.spaces, n)
	}
}

func (a *admission) reserved() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.used
}

// quota is that of a namespace, and how much memory it uses.
func (a *admission) quota(n Namespace) (_ Quota, used uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	q := a.quotas[n]
	q.Namespace = n
	return q, a.spaces[n]
}

// setQuotas replaces the quotas of some namespaces.
func (a *admission) setQuotas(quotas map[Namespace]Quota) {
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.Copy(a.quotas, quotas)
}
