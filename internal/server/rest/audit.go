package rest

import (
	"net/http"
	"sync"
	"time"

	"agentrun.dev/internal/access/audit"
	"agentrun.dev/internal/server"
)

// record is what the audit log gets to know about a request.
type record struct {
	event  audit.Event
	begun  bool // its start was written
	denied bool
}

func newRecord(r *http.Request, id string, t target) *record {
	remote := r.RemoteAddr
	if remote == "" || remote == "@" {
		remote = "unix"
	}
	return &record{event: audit.Event{
		Request: id, Verb: string(t.Operation), Namespace: server.Trimmed(t.Namespace), Object: server.TrimmedTo(t.object, server.MaxObject), Remote: remote,
	}}
}

// begin writes down what is about to be done. What cannot be written is not done.
func (a *api) begin(rec *record, t target) error {
	if !t.Operation.Rule().Audited() {
		return nil
	}
	rec.event.Stage, rec.event.Time = audit.Start, time.Now().UTC()
	if err := a.Audit.Write(rec.event); err != nil {
		a.Log.Error("the audit log cannot be written", "error", err)
		return server.AuditFailed()
	}
	rec.begun = true
	return nil
}

// end writes down what came of it.
func (a *api) end(rec *record, status int) {
	if !rec.begun && !rec.denied {
		return
	}
	if rec.event.Principal == "" {
		allowed, omitted := a.strangers.take(time.Now())
		if !allowed {
			return
		}
		rec.event.Omitted = omitted
	}
	rec.event.Stage, rec.event.Code, rec.event.Time = audit.End, status, time.Now().UTC()
	if err := a.Audit.Write(rec.event); err != nil {
		a.Log.Error("the audit log cannot be written", "request", rec.event.Request, "error", err)
	}
}

// made names an object in the audit log that the path does not: it was made.
func made(r *http.Request, object string) {
	if rec, ok := r.Context().Value(recordKey).(*record); ok {
		rec.event.Object = object
	}
}

// throttle bounds what those write who have shown no key: they could otherwise
// push everything else out of the log.
type throttle struct {
	mu      sync.Mutex // protects all following fields
	left    float64
	last    time.Time
	omitted int
}

const (
	strangersBurst     = 100
	strangersPerSecond = 1
)

// take asks for one more; if it is allowed, omitted is how many were not before.
func (t *throttle) take(now time.Time) (allowed bool, omitted int) {
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
