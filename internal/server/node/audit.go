package node

import (
	"context"
	"crypto/rand"
	"net/http"
	"path"
	"strings"
	"time"

	"google.golang.org/grpc/peer"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/access/audit"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// onlyLooks reports whether a method changes nothing.
func onlyLooks(method string) bool {
	name := path.Base(method)
	return strings.HasPrefix(name, "Get") || strings.HasPrefix(name, "List") || strings.HasPrefix(name, "Watch") || name == "Check"
}

// call is a method with its request.
type call struct {
	method string
	req    any
}

// event makes the event of a call for the audit log.
func (c call) event(ctx context.Context, who access.Principal, stage audit.Stage) audit.Event {
	e := audit.Event{
		Time: time.Now().UTC(), Stage: stage, Request: rand.Text(), Principal: who.Name, Via: who.Via.String(),
		Verb: "grpc:" + server.Trimmed(path.Base(c.method)), Remote: "unix", Essential: who.May(access.Administer),
	}
	if p, ok := peer.FromContext(ctx); ok && who.Via != (access.Component{}) {
		e.Remote = p.Addr.String()
	}
	if r, ok := c.req.(interface{ GetNamespace() string }); ok {
		e.Namespace = server.Trimmed(r.GetNamespace())
	}
	switch r := c.req.(type) {
	case interface{ GetName() string }:
		e.Object = server.TrimmedTo(r.GetName(), server.MaxObject)
	case interface{ GetSnapshot() string }:
		e.Object = server.TrimmedTo(r.GetSnapshot(), server.MaxObject)
	}
	return e
}

// audited does a call, if it is allowed. As in REST, calls that change something are
// in the audit log, and a call that cannot be recorded there is not done. Refused
// calls are recorded as well.
func (n *nodeAPI) audited(ctx context.Context, who access.Principal, c call, do func(context.Context) error) error {
	err := n.authoriseCall(ctx, who, c.method, c.req)
	if err != nil && !sandbox.HasCode(err, sandbox.CodeInvalid) {
		event := c.event(ctx, who, audit.End)
		n.auditRefused(n.refusals.Of(who.Name, event.Time), event, err)
		return err
	}
	serve := func() error {
		if err != nil { // the name in the request is not valid
			return err
		}
		return do(ctx)
	}
	if onlyLooks(c.method) && !operationOf(c.method).Rule().Audit {
		return serve()
	}
	event := c.event(ctx, who, audit.Start)
	if err := n.Audit.Write(event); err != nil {
		n.Log.Error("the audit log cannot be written", "error", err)
		return server.AuditFailed()
	}
	err = serve()
	n.auditEnd(event, err)
	return err
}

// auditEnd records the result of a call.
func (n *nodeAPI) auditEnd(event audit.Event, err error) {
	event.Stage, event.Time, event.Code = audit.End, time.Now().UTC(), http.StatusOK
	if err != nil {
		event.Code = server.Status(server.ToError(err).Code)
	}
	if err := n.Audit.Write(event); err != nil {
		n.Log.Error("the audit log cannot be written", "request", event.Request, "error", err)
	}
}

// auditRefused records a request that was refused before the node looked anything up. The
// lines are bounded, so that no principal can push those of others out of the log.
func (n *nodeAPI) auditRefused(t *server.Throttle, event audit.Event, err error) {
	allowed, omitted := t.Take(time.Now())
	if !allowed {
		return
	}
	event.Omitted = omitted
	n.Log.Warn("refused", "verb", event.Verb, "via", event.Via, "remote", event.Remote, "error", err)
	n.auditEnd(event, err)
}
