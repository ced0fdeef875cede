package node

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/access/audit"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/server"
)

// TestNodeAudit: calls that change something are in the audit log with their
// principal, before and after they are done; calls that only look are not. A call
// that cannot be recorded is not done.
func TestNodeAudit(t *testing.T) {
	broken := false
	c := newNodeClient(t, func(cfg *server.Config) {
		below := cfg.Audit
		cfg.Audit = managertest.Auditor(func(e audit.Event) error {
			if broken {
				return managertest.FullDisk(e)
			}
			return below.Write(e)
		})
	})
	_, err := c.DeletePool(c.ctx, &nodev1.DeletePoolRequest{Namespace: "default", Name: "nobody"})
	wantRefused(t, err, codes.NotFound, "not_found", "nobody")
	if _, err := c.ListPools(c.ctx, &nodev1.ListPoolsRequest{Namespace: "default"}); err != nil {
		t.Fatal(err)
	}
	events := c.Events()
	if len(events) != 2 {
		t.Fatalf("%+v", events)
	}
	for i, want := range []audit.Event{{Stage: audit.Start}, {Stage: audit.End, Code: 404}} {
		e := events[i]
		if e.Stage != want.Stage || e.Code != want.Code || e.Verb != "grpc:DeletePool" || e.Namespace != "default" || e.Object != "nobody" || !strings.HasPrefix(e.Principal, "uid:") || e.Request == "" {
			t.Errorf("%+v", e)
		}
	}
	broken = true
	_, err = c.DeletePool(c.ctx, &nodev1.DeletePoolRequest{Namespace: "default", Name: "nobody"})
	wantRefused(t, err, codes.Unavailable, "audit_failed", "audit log")
	if _, err := c.ListPools(c.ctx, &nodev1.ListPoolsRequest{Namespace: "default"}); err != nil {
		t.Errorf("it only looks: %v", err)
	}
}
