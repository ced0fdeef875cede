package server

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
)

// onlyLooks reports whether a method changes nothing.
func onlyLooks(method string) bool {
	name := path.Base(method)
	return strings.HasPrefix(name, "Get") || strings.HasPrefix(name, "List") || strings.HasPrefix(name, "Watch")
}

// audited does a call that is in the audit log, as REST's are: what cannot be
// written down is not done.
func (n *nodeAPI) audited(ctx context.Context, who access.Principal, method string, req any, do func(context.Context) error) error {
	if onlyLooks(method) {
		return do(ctx)
	}
	event := audit.Event{
		Time: time.Now().UTC(), Stage: audit.Start, Request: rand.Text(), Principal: who.Name, Verb: "grpc:" + path.Base(method), Remote: "unix",
	}
	if r, ok := req.(interface{ GetNamespace() string }); ok {
		event.Namespace = trimmed(r.GetNamespace())
	}
	if r, ok := req.(interface{ GetName() string }); ok {
		event.Object = trimmedTo(r.GetName(), maxObject)
	}
	if err := n.Audit.Write(event); err != nil {
		n.Log.Error("the audit log cannot be written", "error", err)
		return auditFailed()
	}
	err := do(ctx)
	event.Stage, event.Time, event.Code = audit.End, time.Now().UTC(), http.StatusOK
	if err != nil {
		event.Code = statuses[toError(err).Code]
	}
	if auditErr := n.Audit.Write(event); auditErr != nil {
		n.Log.Error("the audit log cannot be written", "request", event.Request, "error", auditErr)
	}
	return err
}

// auditFailed refuses what would not be in the log.
func auditFailed() error {
	return sandbox.Errorf(codeAudit, "the audit log of the node cannot be written, so nothing is done that belongs into it").
		Try("Make room on the disk of the daemon's state folder")
}
