package server

import (
	"maps"
	"sync"
	"time"

	"agentrun.dev/internal/sandbox"
)

// MaxObject is the length of an object in the audit log: names and ids fit.
const MaxObject = 256

// AuditFailed is the error for a request that the audit log cannot record.
func AuditFailed() error {
	return sandbox.Errorf(CodeAudit, "the audit log of the node cannot be written, so nothing is done that belongs into it").
		Try("Make room on the disk of the daemon's state folder")
}

// Throttle bounds the lines that refused requests write into the audit log. Without it, a
// client with many such requests could push all other lines out of the log. The zero value
// is ready to use.
type Throttle struct {
	mu      sync.Mutex // protects all following fields
	left    float64
	last    time.Time
	omitted int
}

const (
	refusedBurst     = 100
	refusedPerSecond = 1
)

// Take asks to write one more line. If that is allowed, omitted is the number of
// lines that were not allowed since the last one that was.
func (t *Throttle) Take(now time.Time) (allowed bool, omitted int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.last.IsZero() {
		t.left = refusedBurst
	} else {
		t.left = min(refusedBurst, t.left+now.Sub(t.last).Seconds()*refusedPerSecond)
	}
	t.last = now
	if t.left < 1 {
		t.omitted++
		return false, 0
	}
	t.left--
	omitted, t.omitted = t.omitted, 0
	return true, omitted
}

// Throttles has one Throttle for each principal. The zero value is ready to
// use.
type Throttles struct {
	mu  sync.Mutex // protects all following fields
	all map[string]*Throttle
	// others is shared by all further principals while throttlesAtMost
	// principals have their own.
	others Throttle
}

const throttlesAtMost = 4096

// Of returns the throttle of a principal. Strangers share that of the empty
// name.
func (ts *Throttles) Of(principal string, now time.Time) *Throttle {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if t := ts.all[principal]; t != nil {
		return t
	}
	if ts.all == nil {
		ts.all = map[string]*Throttle{}
	}
	if len(ts.all) >= throttlesAtMost {
		maps.DeleteFunc(ts.all, func(_ string, t *Throttle) bool { return t.idle(now) })
	}
	if len(ts.all) >= throttlesAtMost {
		return &ts.others
	}
	t := &Throttle{}
	ts.all[principal] = t
	return t
}

// idle reports whether a throttle allows as much as a new one.
func (t *Throttle) idle(now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return !t.last.IsZero() && now.Sub(t.last) > refusedBurst/refusedPerSecond*time.Second
}
