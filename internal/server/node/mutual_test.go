package node

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/access/accesstest"
	"agentrun.dev/internal/access/audit"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// mutualNode is a daemon that serves gRPC over mutual TLS.
type mutualNode struct {
	*managertest.Node
	ca      *accesstest.CA
	files   accesstest.Files
	address string
	server  *Server
	log     managertest.Log
}

// quick are bounds that a test meets soon.
var quick = bounds{handshake: 300 * time.Millisecond, shaking: 8, connections: 4, look: 10 * time.Millisecond}

func newMutualNode(t testing.TB, b bounds, change ...func(*server.Config)) *mutualNode {
	t.Helper()
	n := &mutualNode{Node: managertest.New(t), ca: accesstest.NewCA(t), files: accesstest.NewFiles(t)}
	n.files.WritePair(t, n.ca.Component("node/n1"))
	n.files.WriteCAs(t, n.ca)
	end, err := access.OpenMutual(access.MutualFiles(n.files))
	if err != nil {
		t.Fatal(err)
	}
	cfg := n.Config()
	cfg.Log = slog.New(slog.NewTextHandler(&n.log, nil))
	for _, do := range change {
		do(&cfg)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n.address, n.server = l.Addr().String(), newMutual(cfg, end, b)
	served := make(chan error, 1)
	go func() { served <- n.server.Serve(l) }()
	t.Cleanup(func() {
		n.server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return n
}

// settings are those of a client with a certificate.
func (n *mutualNode) settings(certs ...tls.Certificate) *tls.Config {
	return &tls.Config{RootCAs: n.ca.Pool(), Certificates: certs}
}

// dial connects with TLS settings, with a connection of its own.
func (n *mutualNode) dial(creds credentials.TransportCredentials) *grpc.ClientConn {
	n.T.Helper()
	conn, err := grpc.NewClient("passthrough:///"+n.address, grpc.WithTransportCredentials(creds), window)
	if err != nil {
		n.T.Fatal(err)
	}
	n.T.Cleanup(func() { _ = conn.Close() }) // a test may have closed it
	return conn
}

// as connects as a component, ROLE/NAME.
func (n *mutualNode) as(component string) *grpc.ClientConn {
	n.T.Helper()
	return n.dial(credentials.NewTLS(n.settings(n.ca.Component(component))))
}

// acting is a context whose calls have metadata: pairs of names and values.
func acting(t testing.TB, pairs ...string) context.Context {
	return metadata.AppendToOutgoingContext(t.Context(), pairs...)
}

// newGatewayClient is a client over mutual TLS with the rights of root on the socket.
func newGatewayClient(t testing.TB, change ...func(*server.Config)) *nodeClient {
	t.Helper()
	c, _ := newGateway(t, change...)
	return c
}

func newGateway(t testing.TB, change ...func(*server.Config)) (*nodeClient, *mutualNode) {
	t.Helper()
	n := newMutualNode(t, defaultBounds, change...)
	conn := n.as("gateway/g")
	return &nodeClient{
		Node: n.Node, NodeClient: nodev1.NewNodeClient(conn), conn: conn, server: n.server,
		ctx: acting(t, "agentrun-principal", "gateway-key:aaaaaaaaaaaa", "agentrun-role", "admin"),
	}, n
}

// TestMutualRoles: the rights of a component itself, and for the principals that
// it names. Each call that changes something, or is refused, is recorded with
// both names.
func TestMutualRoles(t *testing.T) {
	n := newMutualNode(t, defaultBounds)
	controller, gateway, node := n.as("controller/main"), n.as("gateway/g1"), n.as("node/n2")
	before := len(n.Events())

	// For a namespace.
	team := acting(t, "agentrun-principal", "kubernetes:team-a")
	c := nodev1.NewNodeClient(controller)
	managertest.Must(c.ApplyTemplate(team, &nodev1.ApplyTemplateRequest{Namespace: "team-a", Name: "python", Spec: &nodev1.TemplateSpec{Image: "python"}}))(t)
	managertest.Must(c.ApplyPool(team, &nodev1.ApplyPoolRequest{Namespace: "team-a", Name: "pool", Spec: &nodev1.PoolSpec{Template: "python", Replicas: 1}}))(t)
	n.Eventually(func() bool {
		return managertest.Must(c.GetPool(team, &nodev1.GetPoolRequest{Namespace: "team-a", Name: "pool"}))(t).GetReady() == 1
	})
	managertest.Must(c.ClaimSandbox(team, &nodev1.ClaimSandboxRequest{Namespace: "team-a", Name: "a", Pool: "pool"}))(t)
	_, err := c.ClaimSandbox(team, &nodev1.ClaimSandboxRequest{Namespace: "team-b", Name: "a", Pool: "pool"})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "team-b is not one of yours")
	_, err = c.GetNode(team, &nodev1.GetNodeRequest{})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "getNode is not for the role user")

	// Itself: it looks, and changes nothing.
	managertest.Must(c.GetNode(t.Context(), &nodev1.GetNodeRequest{}))(t)
	managertest.Must(c.GetSandbox(t.Context(), &nodev1.GetSandboxRequest{Namespace: "team-a", Name: "a"}))(t)
	managertest.Must(managertest.Must(c.Watch(t.Context(), &nodev1.WatchRequest{AllNamespaces: true}))(t).Recv())(t)
	_, err = c.KillSandbox(t.Context(), &nodev1.KillSandboxRequest{Namespace: "team-a", Name: "a"})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "Name the principal")

	// A gateway: for those who have shown it a key, and for users.
	g := nodev1.NewNodeClient(gateway)
	managertest.Must(g.GetNode(t.Context(), &nodev1.GetNodeRequest{}))(t)
	_, err = g.PauseSandbox(t.Context(), &nodev1.PauseSandboxRequest{Namespace: "team-a", Name: "a"})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "pauseSandbox is not for the role gateway")
	viewer := acting(t, "agentrun-principal", "kubernetes-user:alice@example.com", "agentrun-role", "viewer", "agentrun-namespaces", "team-a,team-b")
	managertest.Must(g.GetSandbox(viewer, &nodev1.GetSandboxRequest{Namespace: "team-a", Name: "a"}))(t)
	_, err = g.PauseSandbox(viewer, &nodev1.PauseSandboxRequest{Namespace: "team-a", Name: "a"})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "pauseSandbox is not for the role viewer")
	admin := acting(t, "agentrun-principal", "gateway-key:bbbbbbbbbbbb", "agentrun-role", "admin")
	managertest.Must(g.GetNode(admin, &nodev1.GetNodeRequest{}))(t)

	// Another node: whether this one serves.
	managertest.Must(healthv1.NewHealthClient(node).Check(t.Context(), &healthv1.HealthCheckRequest{}))(t)
	_, err = nodev1.NewNodeClient(node).GetNode(t.Context(), &nodev1.GetNodeRequest{})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "getNode is not for the role node")

	type line struct {
		stage                audit.Stage
		verb, principal, via string
		code                 int
	}
	var got []line
	for _, e := range n.Events()[before:] {
		if !strings.HasPrefix(e.Remote, "127.0.0.1:") || e.Request == "" {
			t.Errorf("%+v", e)
		}
		got = append(got, line{e.Stage, e.Verb, e.Principal, e.Via, e.Code})
	}
	want := []line{
		{audit.Start, "grpc:ApplyTemplate", "kubernetes:team-a", "controller:main", 0}, {audit.End, "grpc:ApplyTemplate", "kubernetes:team-a", "controller:main", 200},
		{audit.Start, "grpc:ApplyPool", "kubernetes:team-a", "controller:main", 0}, {audit.End, "grpc:ApplyPool", "kubernetes:team-a", "controller:main", 200},
		{audit.Start, "grpc:ClaimSandbox", "kubernetes:team-a", "controller:main", 0}, {audit.End, "grpc:ClaimSandbox", "kubernetes:team-a", "controller:main", 200},
		{audit.End, "grpc:ClaimSandbox", "kubernetes:team-a", "controller:main", 403},
		{audit.End, "grpc:GetNode", "kubernetes:team-a", "controller:main", 403},
		{audit.End, "grpc:KillSandbox", "controller:main", "controller:main", 403},
		{audit.End, "grpc:PauseSandbox", "gateway:g1", "gateway:g1", 403},
		{audit.End, "grpc:PauseSandbox", "kubernetes-user:alice@example.com", "gateway:g1", 403},
		{audit.End, "grpc:GetNode", "node:n2", "node:n2", 403},
	}
	if len(got) != len(want) {
		t.Fatalf("%d events, not %d: %+v", len(got), len(want), got)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("event %d is %+v, not %+v", i, got[i], want[i])
		}
	}
}

// TestMutualSecrets: a sandbox with secrets is forked and checkpointed only by the
// principal that has supplied them, over any controller.
func TestMutualSecrets(t *testing.T) {
	n := newMutualNode(t, defaultBounds)
	c := nodev1.NewNodeClient(n.as("controller/one"))
	team := acting(t, "agentrun-principal", "kubernetes:team-a")
	managertest.Must(c.ApplyTemplate(team, &nodev1.ApplyTemplateRequest{Namespace: "team-a", Name: "python", Spec: &nodev1.TemplateSpec{Image: "python"}}))(t)
	managertest.Must(c.ApplyPool(team, &nodev1.ApplyPoolRequest{Namespace: "team-a", Name: "pool", Spec: &nodev1.PoolSpec{Template: "python"}}))(t)
	n.Eventually(func() bool {
		return managertest.Must(c.GetTemplate(team, &nodev1.GetTemplateRequest{Namespace: "team-a", Name: "python"}))(t).GetPhase() == nodev1.Phase_PHASE_READY
	})
	// gRPC takes no secrets yet: the claim is made as the server would have it made.
	ctx := sandbox.WithPrincipal(t.Context(), "kubernetes:team-a")
	managertest.Must(n.Manager.ApplySecret(ctx, sandbox.Key{Namespace: "team-a", Name: "s"}, sandbox.SecretData{"k": []byte("v")}))(t)
	_, _, err := n.Manager.Claim(ctx, sandbox.ClaimRequest{
		Key: sandbox.Key{Namespace: "team-a", Name: "a"}, Spec: sandbox.ClaimSpec{Pool: "pool", Secrets: []sandbox.SecretRef{{Secret: "s", Key: "k"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	fork := &nodev1.ForkSandboxRequest{Namespace: "team-a", Source: "a", Replicas: 1}
	managertest.Must(c.ForkSandbox(team, fork))(t)
	managertest.Must(nodev1.NewNodeClient(n.as("controller/two")).ForkSandbox(team, fork))(t)
	g := nodev1.NewNodeClient(n.as("gateway/g"))
	for _, principal := range []string{"gateway-key:aaaaaaaaaaaa", "kubernetes-user:kubernetes:team-a", "kubernetes-user:team-a"} {
		_, err = g.ForkSandbox(acting(t, "agentrun-principal", principal, "agentrun-role", "admin"), fork)
		wantRefused(t, err, codes.PermissionDenied, "permission_denied", "holds secrets that kubernetes:team-a has supplied")
	}
	_, err = c.ForkSandbox(acting(t, "agentrun-principal", "kubernetes:team-b"), fork)
	wantRefused(t, err, codes.NotFound, "not_found", "a does not exist")
	_, err = g.ForkSandbox(acting(t, "agentrun-principal", "kubernetes:team-a"), fork)
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "cannot act for")
}

// TestMutualUnlistedRole: an operation that is not for a role is refused for all its
// certificates, whatever principal is named.
func TestMutualUnlistedRole(t *testing.T) {
	n := newMutualNode(t, defaultBounds)
	c := &nodeClient{Node: n.Node, conn: n.as("node/n2"), ctx: t.Context()}
	c.callAll(t, func(string) {}, func(name string, err error) {
		if name == "GetSnapshotParts" || name == "ReadSnapshot" { // for nodes alone; this request names no snapshot
			wantRefused(t, err, codes.InvalidArgument, string(sandbox.CodeInvalid), "digest")
			return
		}
		wantRefused(t, err, codes.PermissionDenied, string(sandbox.CodeDenied), "is not for the role node")
	})
	cfg := n.Config()
	who := access.Principal{Name: "kubernetes:a", Role: access.RoleAdmin, Namespaces: []sandbox.Namespace{access.AllNamespaces}, Via: access.Component{Role: access.RoleNode, Name: "n2"}}
	if err := cfg.Authorise(t.Context(), who, server.Target{Operation: "getNode"}); !sandbox.HasCode(err, sandbox.CodeDenied) {
		t.Errorf("an admin by the certificate of a node: %v", err)
	}
}

// TestMutualUnread: the request of a call that is not for nodes is not read.
func TestMutualUnread(t *testing.T) {
	n := newMutualNode(t, defaultBounds)
	s, err := n.as("node/n2").NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true}, nodev1.Node_ApplyTemplate_FullMethodName)
	if err != nil {
		t.Fatal(err)
	}
	// The request has not been sent, and the answer is there.
	wantRefused(t, s.RecvMsg(&nodev1.Template{}), codes.PermissionDenied, "permission_denied", "putTemplate is not for the role node")
}

// TestMutualFlood: the lines in the audit log of components without rights are
// bounded.
func TestMutualFlood(t *testing.T) {
	n := newMutualNode(t, defaultBounds)
	c := nodev1.NewNodeClient(n.as("node/n2"))
	before := len(n.Events())
	const calls = 500
	for range calls {
		_, err := c.GetNode(t.Context(), &nodev1.GetNodeRequest{})
		wantRefused(t, err, codes.PermissionDenied, "permission_denied", "")
	}
	if written := len(n.Events()) - before; written < 100 || written > calls/2 {
		t.Errorf("%d events of %d calls", written, calls)
	}
}
