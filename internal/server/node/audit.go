package node

import (
	"context"
	"crypto/rand"
	"net/http"
	"path"
	"strings"
	"time"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/access/audit"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// onlyLooks reports whether a method changes nothing.
func onlyLooks(method string) bool {
	name := path.Base(method)
	return strings.HasPrefix(name, "Get") || strings.HasPrefix(name, "List") || strings.HasPrefix(name, "Watch")
}

// call is what was called.
type call struct {
	method string
	req    any
}

// event is what the audit log gets to know about a call.
func (c call) event(who access.Principal, stage audit.Stage) audit.Event {
	e := audit.Event{Time: time.Now().UTC(), Stage: stage, Request: rand.Text(), Principal: who.Name, Verb: "grpc:" + path.Base(c.method), Remote: "unix"}
	if r, ok := c.req.(interface{ GetNamespace() string }); ok {
		e.Namespace = server.Trimmed(r.GetNamespace())
	}
	if r, ok := c.req.(interface{ GetName() string }); ok {
		e.Object = server.TrimmedTo(r.GetName(), server.MaxObject)
	}
	return e
}

// audited does a call, if it is allowed. What changes something is in the audit log,
// as REST's is: what cannot be written down is not done. So is what was refused.
func (n *nodeAPI) audited(ctx context.Context, who access.Principal, c call, do func(context.Context) error) error {
	err := n.authoriseCall(ctx, who, c.method, c.req)
	if err != nil && !sandbox.HasCode(err, sandbox.CodeInvalid) {
		n.auditEnd(c.event(who, audit.End), err)
		return err
	}
	serve := func() error {
		if err != nil { // a name that is none
			return err
		}
		return do(ctx)
	}
	if onlyLooks(c.method) {
		return serve()
	}
	event := c.event(who, audit.Start)
	if err := n.Audit.Write(event); err != nil {
		n.Log.Error("the audit log cannot be written", "error", err)
		return server.AuditFailed()
	}
	err = serve()
	n.auditEnd(event, err)
	return err
}

// auditEnd writes down what came of a call.
func (n *nodeAPI) auditEnd(event audit.Event, err error) {
	event.Stage, event.Time, event.Code = audit.End, time.Now().UTC(), http.StatusOK
	if err != nil {
		event.Code = server.Status(server.ToError(err).Code)
	}
	if err := n.Audit.Write(event); err != nil {
		n.Log.Error("the audit log cannot be written", "request", event.Request, "error", err)
	}
}
