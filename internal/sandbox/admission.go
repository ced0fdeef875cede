package sandbox

import "sync"

// admission counts the memory that machines may use.
type admission struct {
	capacity uint64

	mu   sync.Mutex // protects used
	used uint64
}

// reserve takes bytes, or refuses.
func (a *admission) reserve(bytes uint64) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if bytes > a.capacity-min(a.used, a.capacity) {
		return Errorf(CodeCapacity, "there is no room for a sandbox of %s", mebibytes(bytes)).
			Because("%s of %s are reserved", mebibytes(a.used), mebibytes(a.capacity)).
			Try("End or hibernate sandboxes, or make pools smaller")
	}
	a.used += bytes
	return nil
}

// take reserves without asking: what runs already uses its memory.
func (a *admission) take(bytes uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.used += bytes
}

func (a *admission) release(bytes uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.used -= bytes
}

func (a *admission) reserved() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.used
}
