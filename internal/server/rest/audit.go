package rest

import (
	"net/http"
	"time"

	"agentrun.dev/internal/access/audit"
	"agentrun.dev/internal/server"
)

// record is a request's record for the audit log.
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

// begin records a request before it is done. A request that cannot be recorded is
// not done.
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

// end records the result of a request.
func (a *api) end(rec *record, status int) {
	if !rec.begun && !rec.denied {
		return
	}
	if !rec.begun {
		now := time.Now()
		allowed, omitted := a.refusals.Of(rec.event.Principal, now).Take(now)
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

// made names a new object in the audit log, because the path does not name it.
func made(r *http.Request, object string) {
	if rec, ok := r.Context().Value(recordKey).(*record); ok {
		rec.event.Object = object
	}
}
