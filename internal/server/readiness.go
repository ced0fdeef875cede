package server

import "sync"

// Readiness says whether a daemon serves: not before it has swept what an earlier one has
// left, and not any more when it shuts down. The zero value says no.
type Readiness struct {
	mu      sync.Mutex // protects all following fields
	ready   bool
	changed chan struct{} // closed by the next change; nil if nobody waits for it
}

// Set says it, and tells those who wait for a change.
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

// Now tells whether the daemon serves, and closes changed when that is no longer so.
func (r *Readiness) Now() (ready bool, changed <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.changed == nil {
		r.changed = make(chan struct{})
	}
	return r.ready, r.changed
}
