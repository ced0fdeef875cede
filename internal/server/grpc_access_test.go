package server

import (
	"context"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/sandbox"
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

// TestOperations: what is listed is served by a route or a method, and what is not is
// served to nobody, by either.
func TestOperations(t *testing.T) {
	served := []access.Operation{portOperation}
	for _, o := range routes {
		served = append(served, o)
	}
	for _, m := range methods {
		served = append(served, m.operation)
	}
	for _, o := range access.Operations() {
		if !slices.Contains(served, o) {
			t.Errorf("nothing serves %s", o)
		}
	}
	n := newNode(t)
	admin := access.Local("uid:0")
	if err := (&Config{Service: n.manager}).authorise(t.Context(), admin, target{operation: "unheardOf"}); !sandbox.HasCode(err, access.CodeDenied) {
		t.Errorf("an operation that is not listed: %v", err)
	}
	api := &nodeAPI{Config: Config{Service: n.manager, Audit: n.trail, Log: n.log}}
	if err := api.authoriseCall(t.Context(), admin, "/agentrun.node.v1.Node/Unheard", &nodev1.GetNodeRequest{}); !sandbox.HasCode(err, access.CodeDenied) {
		t.Errorf("a method that is not listed: %v", err)
	}
	err := api.stream(nil, nil, &grpc.StreamServerInfo{FullMethod: "/agentrun.node.v1.Node/WatchUnheard"}, nil)
	wantRefused(t, err, codes.PermissionDenied, string(access.CodeDenied), "WatchUnheard")
}

// asked is an authenticator for which everybody is one principal.
type asked access.Principal

func (p asked) Authenticate(context.Context, access.Credentials) (access.Principal, error) {
	return access.Principal(p), nil
}

// TestNodeRoles: calls need what the same operation needs over REST, and a namespace
// of the principal's. What is refused is in the audit log.
func TestNodeRoles(t *testing.T) {
	who := asked{Name: "key:test", Role: access.RoleAdmin, Namespaces: []sandbox.Namespace{access.AllNamespaces}}
	c := newNodeClient(t, func(cfg *Config) { cfg.Authenticator = &who })
	c.prepare("default")
	before := len(c.events())
	claim := func(namespace string) error {
		_, err := c.ClaimSandbox(c.ctx, &nodev1.ClaimSandboxRequest{Namespace: namespace, Name: "a", Pool: "pool"})
		return err
	}
	who.Role, who.Namespaces = access.RoleViewer, []sandbox.Namespace{"default"}
	wantRefused(t, claim(""), codes.PermissionDenied, "permission_denied", "createSandbox is not for the role viewer")
	_, err := c.GetNode(c.ctx, &nodev1.GetNodeRequest{})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "getNode")
	must(c.GetPool(c.ctx, &nodev1.GetPoolRequest{Name: "pool"}))(t)
	if events := c.events()[before:]; len(events) != 2 || events[0].Verb != "grpc:ClaimSandbox" || events[0].Code != 403 || events[0].Principal != who.Name || events[1].Verb != "grpc:GetNode" {
		t.Errorf("%+v", events)
	}
	who.Role, who.Namespaces = access.RoleUser, []sandbox.Namespace{"mine"}
	wantRefused(t, claim(""), codes.PermissionDenied, "permission_denied", "namespace default is not one of yours")
	wantRefused(t, claim("mine"), codes.NotFound, "not_found", "pool")
	_, err = c.GetPool(c.ctx, &nodev1.GetPoolRequest{Name: "pool"})
	wantRefused(t, err, codes.NotFound, "not_found", "pool pool does not exist")
	_, err = c.ApplyPool(c.ctx, &nodev1.ApplyPoolRequest{Name: "pool", Spec: &nodev1.PoolSpec{Template: "python"}})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "not one of yours")
	w := must(c.WatchSandboxes(c.ctx, &nodev1.WatchSandboxesRequest{AllNamespaces: true}))(t)
	_, err = w.Recv()
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "namespaces")
	must(must(c.WatchSandboxes(c.ctx, &nodev1.WatchSandboxesRequest{Namespace: "mine"}))(t).Recv())(t)
	who.Role = access.RoleSandbox
	_, err = c.GetSandbox(c.ctx, &nodev1.GetSandboxRequest{Namespace: "mine"})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "getSandbox")
}
