package node

import (
	"maps"
	"slices"
	"sync"

	"agentrun.dev/internal/sandbox"
)

// admission counts the memory that machines may use and the bytes that
// sandboxes store, in total and for each namespace. docs/design/memory.md has
// the rules.
type admission struct {
	capacity uint64
	// changed is told that memory was taken or given back. It must not wait.
	changed func()
	// drop frees memory that no machine holds any more. That takes time, so it is
	// called without the mutex. A caller that wants to hold the same again waits for
	// left.
	drop func(ids []string)
	left *sync.Cond // mu is its lock

	mu      sync.Mutex // protects all following fields
	leaving map[string]bool
	used    uint64
	spaces  map[sandbox.Namespace]uint64 // memory that each uses; namespaces that use no memory are left out
	held    map[holding]int              // how many machines of a namespace hold an id
	users   map[string]int               // how many namespaces hold an id
	stored  map[sandbox.Namespace]uint64 // bytes on disk, likewise
	shares  map[holding]int              // how many stored items of a namespace share an id
	quotas  map[sandbox.Namespace]sandbox.Quota
}

// holding is a piece of shared data that a namespace is charged for once.
type holding struct {
	namespace sandbox.Namespace
	id        string
}

func newAdmission(capacity uint64, drop func(ids []string)) *admission {
	a := &admission{
		capacity: capacity, drop: drop, changed: func() {}, leaving: map[string]bool{},
		spaces: map[sandbox.Namespace]uint64{}, held: map[holding]int{}, users: map[string]int{},
		stored: map[sandbox.Namespace]uint64{}, shares: map[holding]int{}, quotas: map[sandbox.Namespace]sandbox.Quota{},
	}
	a.left = sync.NewCond(&a.mu)
	return a
}

// reserve takes bytes for a namespace, and the shared memory that the machine
// holds, or refuses both. Shared memory that the namespace already holds is free.
func (a *admission) reserve(n sandbox.Namespace, bytes uint64, held ...sandbox.Held) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.await(held)
	need := bytes + a.missing(n, held)
	if most, used := a.quotas[n].Memory, a.spaces[n]; most > 0 && need > most-min(used, most) {
		return sandbox.Errorf(sandbox.CodeCapacity, "the quota of namespace %s has no room for a sandbox of %s", n, sandbox.Mebibytes(need)).
			Because("%s of its %s of memory are reserved", sandbox.Mebibytes(used), sandbox.Mebibytes(most)).
			Try("End or hibernate sandboxes of namespace %s, make its pools smaller, or raise its quota", n)
	}
	if need > a.capacity-min(a.used, a.capacity) {
		return sandbox.Errorf(sandbox.CodeCapacity, "there is no room for a sandbox of %s", sandbox.Mebibytes(need)).
			Because("%s of %s are reserved", sandbox.Mebibytes(a.used), sandbox.Mebibytes(a.capacity)).
			Try("End or hibernate sandboxes, or make pools smaller")
	}
	a.add(n, bytes, held)
	return nil
}

// await waits until no item of a list is being freed. The caller holds the mutex.
func (a *admission) await(held []sandbox.Held) {
	for slices.ContainsFunc(held, func(h sandbox.Held) bool { return a.leaving[h.ID] }) {
		a.left.Wait()
	}
}

// missing is the size of the items that a namespace would hold in addition.
func (a *admission) missing(n sandbox.Namespace, held []sandbox.Held) (bytes uint64) {
	for _, h := range held {
		if a.held[holding{n, h.ID}] == 0 {
			bytes += h.Bytes
		}
	}
	return bytes
}

// take reserves without a check: a machine that already runs uses its memory.
func (a *admission) take(n sandbox.Namespace, bytes uint64, held ...sandbox.Held) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.await(held)
	a.add(n, bytes, held)
}

func (a *admission) add(n sandbox.Namespace, bytes uint64, held []sandbox.Held) {
	for _, h := range held {
		k := holding{n, h.ID}
		if a.held[k]++; a.held[k] == 1 {
			a.users[h.ID]++
			bytes += h.Bytes
		}
	}
	a.used += bytes
	a.spaces[n] += bytes
	a.changed()
}

// release gives memory back. Items that no namespace holds any more are freed
// first.
func (a *admission) release(n sandbox.Namespace, bytes uint64, held ...sandbox.Held) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var gone []string
	for _, h := range held {
		k := holding{n, h.ID}
		if a.held[k]--; a.held[k] > 0 {
			continue
		}
		delete(a.held, k)
		bytes += h.Bytes
		if a.users[h.ID]--; a.users[h.ID] == 0 {
			delete(a.users, h.ID)
			a.leaving[h.ID] = true
			gone = append(gone, h.ID)
		}
	}
	if len(gone) > 0 {
		a.mu.Unlock()
		a.drop(gone)
		a.mu.Lock()
		for _, id := range gone {
			delete(a.leaving, id)
		}
		a.left.Broadcast()
	}
	a.used -= bytes
	a.changed()
	if a.spaces[n] -= bytes; a.spaces[n] == 0 {
		delete(a.spaces, n)
	}
}

func (a *admission) reserved() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.used
}

// store counts bytes on disk, or refuses them. Bytes that are shared with other stored
// data of the namespace count once. Called without bytes, it says whether any bytes
// would be refused.
func (a *admission) store(n sandbox.Namespace, bytes uint64, shared ...sandbox.Held) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	need := bytes
	for _, h := range shared {
		if a.shares[holding{n, h.ID}] == 0 {
			need += h.Bytes
		}
	}
	if most, used := a.quotas[n].Storage, a.stored[n]; most > 0 && (used >= most || need > most-used) {
		err := sandbox.Errorf(sandbox.CodeCapacity, "the quota of namespace %s has no room for what is to be stored", n)
		if need > 0 {
			err = sandbox.Errorf(sandbox.CodeCapacity, "the quota of namespace %s has no room for %s on disk", n, sandbox.Mebibytes(need))
		}
		return err.Because("templates, hibernated sandboxes and checkpoints take %s of its %s of storage", sandbox.Mebibytes(used), sandbox.Mebibytes(most)).
			Try("End hibernated sandboxes or delete checkpoints or templates of namespace %s, or raise its quota", n)
	}
	a.addStored(n, bytes, shared)
	return nil
}

func (a *admission) addStored(n sandbox.Namespace, bytes uint64, shared []sandbox.Held) {
	for _, h := range shared {
		k := holding{n, h.ID}
		if a.shares[k]++; a.shares[k] == 1 {
			bytes += h.Bytes
		}
	}
	a.stored[n] += bytes
}

// keep counts bytes that are on disk already.
func (a *admission) keep(n sandbox.Namespace, bytes uint64, shared ...sandbox.Held) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.addStored(n, bytes, shared)
}

// discard takes back the count of bytes that have left the disk.
func (a *admission) discard(n sandbox.Namespace, bytes uint64, shared ...sandbox.Held) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, h := range shared {
		k := holding{n, h.ID}
		if a.shares[k]--; a.shares[k] == 0 {
			delete(a.shares, k)
			bytes += h.Bytes
		}
	}
	if a.stored[n] -= bytes; a.stored[n] == 0 {
		delete(a.stored, n)
	}
}

// isShared reports whether stored data of a namespace shares the item of an id.
func (a *admission) isShared(n sandbox.Namespace, id string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, shared := a.shares[holding{n, id}]
	return shared
}

// quota returns the quota of a namespace, with the memory and the storage that
// it uses.
func (a *admission) quota(n sandbox.Namespace) sandbox.QuotaUse {
	a.mu.Lock()
	defer a.mu.Unlock()
	q := a.quotas[n]
	q.Namespace = n
	return sandbox.QuotaUse{Quota: q, UsedMemory: a.spaces[n], UsedStorage: a.stored[n]}
}

// setQuotas replaces the quotas of some namespaces.
func (a *admission) setQuotas(quotas map[sandbox.Namespace]sandbox.Quota) {
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.Copy(a.quotas, quotas)
}
