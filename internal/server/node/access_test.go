package node

import (
	"context"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// TestMethods: every method is an operation that somebody may, and no other is
// listed. What changes something needs the right to.
func TestMethods(t *testing.T) {
	served := map[string]bool{}
	add := func(name string) {
		full := "/" + nodev1.Node_ServiceDesc.ServiceName + "/" + name
		served[full] = true
		m, listed := methods[full]
		need := m.operation.Rule().Need
		switch {
		case !listed || need == access.None:
			t.Errorf("%s is %+v", name, m)
		case !onlyLooks(full) && need < access.Change:
			t.Errorf("%s only needs %d", name, need)
		case (m.by == "") != (m.kind == ""):
			t.Errorf("%s names %q by %q", name, m.kind, m.by)
		}
	}
	for _, m := range nodev1.Node_ServiceDesc.Methods {
		add(m.MethodName)
	}
	for _, m := range nodev1.Node_ServiceDesc.Streams {
		add(m.StreamName)
	}
	for full := range methods {
		if !served[full] {
			t.Errorf("%s is no method", full)
		}
	}
}

// TestUnlisted: an operation or a method that is not listed is served to nobody.
func TestUnlisted(t *testing.T) {
	n := managertest.New(t)
	cfg := n.Config()
	admin := access.Local("uid:0")
	if err := cfg.Authorise(t.Context(), admin, server.Target{Operation: "unheardOf"}); !sandbox.HasCode(err, sandbox.CodeDenied) {
		t.Errorf("an operation that is not listed: %v", err)
	}
	api := &nodeAPI{Config: cfg}
	if err := api.authoriseCall(t.Context(), admin, "/agentrun.node.v1.Node/Unheard", &nodev1.GetNodeRequest{}); !sandbox.HasCode(err, sandbox.CodeDenied) {
		t.Errorf("a method that is not listed: %v", err)
	}
	err := api.stream(nil, nil, &grpc.StreamServerInfo{FullMethod: "/agentrun.node.v1.Node/WatchUnheard"}, nil)
	wantRefused(t, err, codes.PermissionDenied, string(sandbox.CodeDenied), "WatchUnheard")
}

// asked is an authenticator for which everybody is one principal.
type asked struct {
	atomic.Pointer[access.Principal]
}

func (a *asked) Authenticate(context.Context, access.Credentials) (access.Principal, error) {
	return *a.Load(), nil
}

// now makes everybody a principal of a role.
func (a *asked) now(role access.Role, namespaces ...sandbox.Namespace) {
	a.Store(&access.Principal{Name: "key:test", Role: role, Namespaces: namespaces})
}

// TestNodeRoles: calls need what the same operation needs over REST, and a namespace
// of the principal's. What is refused is in the audit log.
func TestNodeRoles(t *testing.T) {
	var who asked
	who.now(access.RoleAdmin, access.AllNamespaces)
	c := newNodeClient(t, func(cfg *server.Config) { cfg.Authenticator = &who })
	c.prepare("default")
	before := len(c.Events())
	claim := func(namespace string) error {
		_, err := c.ClaimSandbox(c.ctx, &nodev1.ClaimSandboxRequest{Namespace: namespace, Name: "a", Pool: "pool"})
		return err
	}
	who.now(access.RoleViewer, "default")
	wantRefused(t, claim(""), codes.PermissionDenied, "permission_denied", "createSandbox is not for the role viewer")
	_, err := c.GetNode(c.ctx, &nodev1.GetNodeRequest{})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "getNode")
	managertest.Must(c.GetPool(c.ctx, &nodev1.GetPoolRequest{Name: "pool"}))(t)
	if events := c.Events()[before:]; len(events) != 2 || events[0].Verb != "grpc:ClaimSandbox" || events[0].Code != 403 || events[0].Principal != "key:test" || events[1].Verb != "grpc:GetNode" {
		t.Errorf("%+v", events)
	}
	who.now(access.RoleUser, "mine")
	wantRefused(t, claim(""), codes.PermissionDenied, "permission_denied", "namespace default is not one of yours")
	wantRefused(t, claim("mine"), codes.NotFound, "not_found", "pool")
	_, err = c.GetPool(c.ctx, &nodev1.GetPoolRequest{Name: "pool"})
	wantRefused(t, err, codes.NotFound, "not_found", "pool pool does not exist")
	_, err = c.ApplyPool(c.ctx, &nodev1.ApplyPoolRequest{Name: "pool", Spec: &nodev1.PoolSpec{Template: "python"}})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "not one of yours")
	w := managertest.Must(c.WatchSandboxes(c.ctx, &nodev1.WatchSandboxesRequest{AllNamespaces: true}))(t)
	_, err = w.Recv()
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "namespaces")
	managertest.Must(managertest.Must(c.WatchSandboxes(c.ctx, &nodev1.WatchSandboxesRequest{Namespace: "mine"}))(t).Recv())(t)
	who.now(access.RoleSandbox, "mine")
	_, err = c.GetSandbox(c.ctx, &nodev1.GetSandboxRequest{Namespace: "mine"})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "getSandbox")
}
