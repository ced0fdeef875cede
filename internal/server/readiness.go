package server

import "sync"

// Readiness says whether a daemon serves. It does not serve until it has swept the
// remains of an earlier daemon, nor once it shuts down. The zero value is not ready.
type Readiness struct {
	mu      sync.Mutex // protects all following fields
	ready   bool
	changed chan struct{} // closed by the next change; nil if no goroutine waits for it
}

// Set sets the state, and tells the goroutines that wait for a change.
func (r *Readiness) Set(ready bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if ready == r.ready {
		return
	}
	r.ready = ready
	if r.changed != nil {
		close(r.changed)
		r.changed = nil
	}
}

// Now reports whether the daemon serves. The next change closes changed.
func (r *Readiness) Now() (ready bool, changed <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.changed == nil {
		r.changed = make(chan struct{})
	}
	return r.ready, r.changed
}
