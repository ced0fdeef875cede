package server

import (
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

// Throttle bounds what those write into the audit log who have shown that they may do
// nothing: they could otherwise push everything else out of it. The zero value is ready
// to use.
type Throttle struct {
	mu      sync.Mutex // protects all following fields
	left    float64
	last    time.Time
	omitted int
}

const (
	strangersBurst     = 100
	strangersPerSecond = 1
)

// Take asks for one more; if it is allowed, omitted is how many were not before.
func (t *Throttle) Take(now time.Time) (allowed bool, omitted int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.last.IsZero() {
		t.left = strangersBurst
	} else {
		t.left = min(strangersBurst, t.left+now.Sub(t.last).Seconds()*strangersPerSecond)
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
