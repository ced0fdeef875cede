package server

import (
	"maps"
	"sync"
	"time"

	"agentrun.dev/internal/sandbox"
)

// MaxObject is the length of an object in the audit log: names and ids fit.
const MaxObject = 256

// AuditFailed refuses what would not be in the log.
func AuditFailed() error {
	return sandbox.Errorf(CodeAudit, "the audit log of the node cannot be written, so nothing is done that belongs into it").
		Try("Make room on the disk of the daemon's state folder")
}

// Throttle bounds what is written into the audit log of requests that are refused: whoever
// makes many could otherwise push everything else out of it. The zero value is ready to use.
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

// Take asks for one more; if it is allowed, omitted is how many were not before.
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

// Throttles are those of principals, one each. The zero value is ready to use.
type Throttles struct {
	mu  sync.Mutex // protects all following fields
	all map[string]*Throttle
	// others is shared by those who come while throttlesAtMost have one.
	others Throttle
}

const throttlesAtMost = 4096

// Of is the throttle of a principal; strangers have the empty name.
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

// idle reports whether a throttle is as good as a new one.
func (t *Throttle) idle(now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return !t.last.IsZero() && now.Sub(t.last) > refusedBurst/refusedPerSecond*time.Second
}
