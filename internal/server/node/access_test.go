package node

import (
	"context"
	"errors"
	"maps"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/emptypb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// TestMethods: every method is an operation that some role may call, and no
// other is listed. A method that changes something needs the permission to.
func TestMethods(t *testing.T) {
	served := map[string]bool{}
	add := func(d grpc.ServiceDesc, name string) {
		full := "/" + d.ServiceName + "/" + name
		served[full] = true
		m, listed := methods[full]
		need := m.operation.Rule().Need
		switch {
		case !listed || need == access.None:
			t.Errorf("%s is %+v", name, m)
		case !onlyLooks(full) && need < access.Use:
			t.Errorf("%s only needs %d", name, need)
		case (m.by == "") != (m.kind == ""):
			t.Errorf("%s names %q by %q", name, m.kind, m.by)
		}
	}
	for _, d := range []grpc.ServiceDesc{nodev1.Node_ServiceDesc, healthv1.Health_ServiceDesc} {
		for _, m := range d.Methods {
			add(d, m.MethodName)
		}
		for _, m := range d.Streams {
			add(d, m.StreamName)
		}
	}
	for full := range methods {
		if !served[full] {
			t.Errorf("%s is no method", full)
		}
	}
}

// newRequest is an empty message of the type that a method takes.
func newRequest(t *testing.T, name string) proto.Message {
	t.Helper()
	m := nodev1.File_agentrun_node_v1_node_proto.Services().ByName("Node").Methods().ByName(protoreflect.Name(name))
	message, err := protoregistry.GlobalTypes.FindMessageByName(m.Input().FullName())
	if err != nil {
		t.Fatal(err)
	}
	return message.New().Interface()
}

// callAll calls every method with an empty request. before gets its full name, and
// refused the answer.
func (c *nodeClient) callAll(t *testing.T, before func(full string), refused func(name string, err error)) {
	t.Helper()
	path := "/" + nodev1.Node_ServiceDesc.ServiceName + "/"
	for _, m := range nodev1.Node_ServiceDesc.Methods {
		before(path + m.MethodName)
		refused(m.MethodName, c.conn.Invoke(c.ctx, path+m.MethodName, newRequest(t, m.MethodName), &emptypb.Empty{}))
	}
	for _, d := range nodev1.Node_ServiceDesc.Streams {
		before(path + d.StreamName)
		s, err := c.conn.NewStream(c.ctx, &d, path+d.StreamName)
		if err != nil {
			t.Fatal(err)
		}
		_ = s.SendMsg(newRequest(t, d.StreamName)) // it may have been refused already
		refused(d.StreamName, errors.Join(s.CloseSend(), s.RecvMsg(&emptypb.Empty{})))
	}
}

// TestUnlisted: an operation or a method that is not listed is refused.
func TestUnlisted(t *testing.T) {
	c := newNodeClient(t)
	cfg := c.Config()
	if err := cfg.Authorise(t.Context(), access.Local("uid:0"), server.Target{Operation: "unheardOf"}); !sandbox.HasCode(err, sandbox.CodeDenied) {
		t.Errorf("an operation that is not listed: %v", err)
	}
	listed := maps.Clone(methods)
	t.Cleanup(func() { methods = listed })
	c.callAll(t, func(full string) {
		methods = maps.Clone(listed)
		delete(methods, full)
	}, func(name string, err error) {
		wantRefused(t, err, codes.PermissionDenied, string(sandbox.CodeDenied), name+" is served to nobody")
	})
}

// TestAllAuthorised: every method asks whether its caller may call it.
func TestAllAuthorised(t *testing.T) {
	var who asked
	who.now("")
	c := newNodeClient(t, func(cfg *server.Config) { cfg.Authenticator = &who })
	c.callAll(t, func(string) {}, func(name string, err error) {
		wantRefused(t, err, codes.PermissionDenied, string(sandbox.CodeDenied), "is not for the role")
	})
}

// asked is an authenticator that makes all callers one principal.
type asked struct {
	atomic.Pointer[access.Principal]
}

func (a *asked) Authenticate(context.Context, access.Credentials) (access.Principal, error) {
	return *a.Load(), nil
}

// now makes all callers a principal of a role.
func (a *asked) now(role access.Role, namespaces ...sandbox.Namespace) {
	a.Store(&access.Principal{Name: "key:test", Role: role, Namespaces: namespaces})
}

// TestNodeRoles: calls need the permissions of the same operation over REST, and a
// namespace of the principal's. Refused calls are in the audit log.
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
	w := managertest.Must(c.Watch(c.ctx, &nodev1.WatchRequest{AllNamespaces: true}))(t)
	_, err = w.Recv()
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "namespaces")
	managertest.Must(managertest.Must(c.Watch(c.ctx, &nodev1.WatchRequest{Namespace: "mine"}))(t).Recv())(t)
	w = managertest.Must(c.Watch(c.ctx, &nodev1.WatchRequest{Namespace: "mine", Kinds: []nodev1.ObjectKind{nodev1.ObjectKind_OBJECT_KIND_NODE}}))(t)
	_, err = w.Recv()
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "with all namespaces")
	who.now(access.RoleSandbox, "mine")
	_, err = c.GetSandbox(c.ctx, &nodev1.GetSandboxRequest{Namespace: "mine"})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "getSandbox")
}

// TestRefusedAreBounded: a principal cannot write a line into the audit log for each of its
// many refused calls; those of another are written.
func TestRefusedAreBounded(t *testing.T) {
	var who asked
	c := newNodeClient(t, func(cfg *server.Config) { cfg.Authenticator = &who })
	const flood = 300
	refused := func(name string) {
		who.Store(&access.Principal{Name: name, Role: access.RoleViewer, Namespaces: []sandbox.Namespace{"mine"}})
		_, err := c.DeletePool(c.ctx, &nodev1.DeletePoolRequest{Namespace: "mine", Name: "pool"})
		wantRefused(t, err, codes.PermissionDenied, "permission_denied", "deletePool is not for the role viewer")
	}
	for range flood {
		refused("key:loud")
	}
	refused("key:quiet")
	wrote := map[string]int{}
	for _, e := range c.Events() {
		wrote[e.Principal]++
	}
	if wrote["key:quiet"] != 1 || wrote["key:loud"] < 100 || wrote["key:loud"] == flood {
		t.Errorf("%v", wrote)
	}
}
