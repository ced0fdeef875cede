package node

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/access/audit"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
	"agentrun.dev/internal/server/remote"
)

// useClient holds sandbox a by a gateway, for a principal with all rights.
type useClient struct {
	*nodeClient
	node    *mutualNode
	service *remote.Service
	key     sandbox.Key
}

func newUseClient(t testing.TB, claim *nodev1.ClaimSandboxRequest, change ...func(*server.Config)) *useClient {
	t.Helper()
	c, n := newGateway(t, change...)
	c.prepare("default")
	claim.Name, claim.Pool = "a", "pool"
	managertest.Must(c.ClaimSandbox(c.ctx, claim))(t)
	u := &useClient{nodeClient: c, node: n, key: sandbox.Key{Namespace: "default", Name: "a"}}
	u.service = remote.New(remote.As(c.conn, access.Acting{Principal: "gateway-key:aaaaaaaaaaaa", Role: access.RoleAdmin}))
	return u
}

// use begins a session, which ends with the test.
func (u *useClient) use() sandbox.Session {
	u.T.Helper()
	s := managertest.Must(u.service.Use(u.T.Context(), u.key))(u.T)
	u.T.Cleanup(s.Close)
	return s
}

// shell runs a command on a session.
func shell(ctx context.Context, s sandbox.Session, command string) (string, error) {
	var out bytes.Buffer
	_, err := s.Agent().Run(ctx, guestrpc.ExecRequest{Argv: []string{"/bin/sh", "-c", command}}, nil, &out, nil)
	return out.String(), err
}

// works requires that a sandbox is served.
func (u *useClient) works(s sandbox.Session) {
	u.T.Helper()
	if out, err := shell(u.T.Context(), s, "echo works"); err != nil || out != "works\n" {
		u.T.Errorf("%q, %v", out, err)
	}
}

func open(name string) *nodev1.UseSandboxRequest {
	return &nodev1.UseSandboxRequest{Request: &nodev1.UseSandboxRequest_Open{Open: &nodev1.OpenSandbox{Name: name}}}
}

func data(b []byte) *nodev1.UseSandboxRequest {
	return &nodev1.UseSandboxRequest{Request: &nodev1.UseSandboxRequest_Data{Data: b}}
}

// until reads a stream to its end.
func until(s grpc.ServerStreamingClient[nodev1.UseSandboxResponse]) error {
	for {
		if _, err := s.Recv(); err != nil {
			return err
		}
	}
}

// TestUseHostile: no stream opens a sandbox that its principal may not use, and no
// stream goes on after a malformed message. Others are served meanwhile.
func TestUseHostile(t *testing.T) {
	u := newUseClient(t, &nodev1.ClaimSandboxRequest{})
	other := u.use()
	gateway := []string{"agentrun-principal", "gateway-key:bbbbbbbbbbbb", "agentrun-role"}
	user := func(namespace string) []string {
		return append(slices.Clone(gateway), "user", "agentrun-namespaces", namespace)
	}
	lie := open("a")
	lie.GetOpen().Precondition = &nodev1.Precondition{Id: string(sandbox.NewID())}
	nobody := open("a")
	nobody.GetOpen().Namespace = "../default"
	hello := append([]byte("AGRUNRPC"), 0xff, 0xff)
	for name, c := range map[string]struct {
		by        string
		metadata  []string
		sent      []*nodev1.UseSandboxRequest
		code      codes.Code
		own, says string
	}{
		"another namespace":      {"gateway", user("other"), []*nodev1.UseSandboxRequest{open("a")}, codes.NotFound, "not_found", "a"},
		"a viewer":               {"gateway", append(slices.Clone(gateway), "viewer", "agentrun-namespaces", "default"), []*nodev1.UseSandboxRequest{open("a")}, codes.PermissionDenied, "permission_denied", "role viewer"},
		"a gateway for itself":   {"gateway", nil, []*nodev1.UseSandboxRequest{open("a")}, codes.PermissionDenied, "permission_denied", "Name the principal"},
		"a controller itself":    {"controller", nil, []*nodev1.UseSandboxRequest{open("a")}, codes.PermissionDenied, "permission_denied", "Name the principal"},
		"another's namespace":    {"controller", []string{"agentrun-principal", "kubernetes:other"}, []*nodev1.UseSandboxRequest{open("a")}, codes.NotFound, "not_found", "a"},
		"a node":                 {"node", nil, []*nodev1.UseSandboxRequest{open("a")}, codes.PermissionDenied, "permission_denied", "useSandbox is not for the role node"},
		"a node for a key":       {"node", user("default"), []*nodev1.UseSandboxRequest{open("a")}, codes.PermissionDenied, "permission_denied", "useSandbox is not for the role node"},
		"no sandbox":             {"gateway", user("default"), []*nodev1.UseSandboxRequest{open("gone")}, codes.NotFound, "not_found", "gone"},
		"no name":                {"gateway", user("default"), []*nodev1.UseSandboxRequest{open("")}, codes.InvalidArgument, "invalid", "name"},
		"no namespace":           {"gateway", user("default"), []*nodev1.UseSandboxRequest{nobody}, codes.InvalidArgument, "invalid", "namespace"},
		"a NUL":                  {"gateway", user("default"), []*nodev1.UseSandboxRequest{open("a\x00")}, codes.InvalidArgument, "invalid", "NUL"},
		"a precondition lies":    {"gateway", user("default"), []*nodev1.UseSandboxRequest{lie}, codes.FailedPrecondition, "conflict", "id"},
		"an unknown field":       {"gateway", user("default"), []*nodev1.UseSandboxRequest{unknown(open("a"))}, codes.InvalidArgument, "invalid", ""},
		"nothing":                {"gateway", user("default"), []*nodev1.UseSandboxRequest{{}}, codes.InvalidArgument, "invalid", ""},
		"data first":             {"gateway", user("default"), []*nodev1.UseSandboxRequest{data([]byte("x"))}, codes.InvalidArgument, "invalid", ""},
		"a wake first":           {"gateway", user("default"), []*nodev1.UseSandboxRequest{{Request: &nodev1.UseSandboxRequest_Wake{Wake: 1}}}, codes.InvalidArgument, "invalid", ""},
		"open twice":             {"gateway", user("default"), []*nodev1.UseSandboxRequest{open("a"), open("a")}, codes.InvalidArgument, "invalid", "first message"},
		"nothing, later":         {"gateway", user("default"), []*nodev1.UseSandboxRequest{open("a"), {}}, codes.InvalidArgument, "invalid", "first message"},
		"an unknown field later": {"gateway", user("default"), []*nodev1.UseSandboxRequest{open("a"), unknown(data([]byte("AGRUNRPC")))}, codes.InvalidArgument, "invalid", "does not know"},
		"no data":                {"gateway", user("default"), []*nodev1.UseSandboxRequest{open("a"), data(nil)}, codes.InvalidArgument, "invalid", "65548"},
		"too much data":          {"gateway", user("default"), []*nodev1.UseSandboxRequest{open("a"), data(make([]byte, maxData+1))}, codes.InvalidArgument, "invalid", "65548"},
		"far too much data":      {"gateway", user("default"), []*nodev1.UseSandboxRequest{open("a"), data(make([]byte, maxLarge+1))}, codes.ResourceExhausted, "", ""},
		"another protocol":       {"gateway", user("default"), []*nodev1.UseSandboxRequest{open("a"), data([]byte("GET / HTTP/1.1\r\n\r\n"))}, codes.InvalidArgument, "invalid", "not those of a session"},
		"an endless hello":       {"gateway", user("default"), []*nodev1.UseSandboxRequest{open("a"), data(hello)}, codes.InvalidArgument, "invalid", "not those of a session"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(acting(t, c.metadata...), time.Minute)
			defer cancel()
			s := managertest.Must(nodev1.NewNodeClient(u.node.as(c.by + "/x")).UseSandbox(ctx))(t)
			for _, m := range c.sent {
				_ = s.Send(m) // it may have ended already; Recv says why
			}
			err := until(s)
			wantRefused(t, err, c.code, c.own, c.says)
			u.works(other)
		})
	}
}

// TestUseHalfOpen: a stream on which the client sends nothing ends, and delays no
// other call.
func TestUseHalfOpen(t *testing.T) {
	u := newUseClient(t, &nodev1.ClaimSandboxRequest{}, func(cfg *server.Config) { cfg.BodyTimeout = 2 * time.Second })
	other := u.use()
	s := managertest.Must(u.UseSandbox(u.ctx))(t)
	u.works(other)
	wantRefused(t, until(s), codes.Canceled, "", "")
	u.works(other)
}

// TestUsePrivate: methods for the node alone are refused on a stream, and all other methods
// of guestrpc are operations.
func TestUsePrivate(t *testing.T) {
	u := newUseClient(t, &nodev1.ClaimSandboxRequest{})
	s := u.use()
	ctx := t.Context()
	info := func() error { _, err := s.Agent().Info(ctx); return err }
	renew := func() error { _, err := s.Agent().Renew(ctx, guestrpc.RenewRequest{}); return err }
	for name, err := range map[string]error{
		"renew":     renew(),
		"set env":   s.Agent().SetEnv(ctx, guestrpc.SetEnvRequest{}),
		"set clock": s.Agent().SetClock(ctx, guestrpc.SetClockRequest{}),
		"shutdown":  s.Agent().Shutdown(ctx, guestrpc.ShutdownRequest{Mode: guestrpc.PowerOff}),
		"sync":      s.Agent().Sync(ctx),
		"info":      info(),
	} {
		var e *guestrpc.Error
		if !errors.As(err, &e) || e.Code != guestrpc.CodePermissionDenied {
			t.Errorf("%s: %v", name, err)
		}
	}
	u.works(s)
	for m, o := range relayed {
		if need := o.Rule().Need; need != access.Use {
			t.Errorf("method %d is %s, which needs %d", m, o, need)
		}
	}
	// One that is not listed here is not permitted, whatever guestrpc relays.
	delete(relayed, guestrpc.MethodStat)
	defer func() { relayed[guestrpc.MethodStat] = "statFile" }()
	if _, err := s.Agent().Stat(ctx, guestrpc.StatRequest{Path: "/"}); err == nil || !strings.Contains(err.Error(), "served to nobody") {
		t.Errorf("a method that is not listed: %v", err)
	}
}

// TestUseIdle: a stream that is held does not keep a sandbox awake, a call on it does, and
// wakes it.
func TestUseIdle(t *testing.T) {
	u := newUseClient(t, &nodev1.ClaimSandboxRequest{Lifetime: &nodev1.Lifetime{
		IdleTimeout: durationpb.New(200 * time.Millisecond), OnTimeout: nodev1.TimeoutAction_TIMEOUT_ACTION_HIBERNATE,
	}})
	state := func() nodev1.SandboxState {
		return managertest.Must(u.GetSandbox(u.ctx, &nodev1.GetSandboxRequest{Name: "a"}))(t).GetState()
	}
	s := u.use()
	for range 2 {
		u.works(s)
		u.Eventually(func() bool { return state() == nodev1.SandboxState_SANDBOX_STATE_HIBERNATED })
	}
	// Longer than the timeout: it would be cut off by the hibernation.
	if out, err := shell(t.Context(), s, "sleep 0.6; echo awake"); err != nil || out != "awake\n" {
		t.Errorf("%q, %v", out, err)
	}
	u.Eventually(func() bool { return state() == nodev1.SandboxState_SANDBOX_STATE_HIBERNATED })
	if again := u.use().Record(); again.State != sandbox.Running {
		t.Errorf("%+v", again)
	}
}

// TestUseByUser: a gateway serves a user, who may not look at the node.
func TestUseByUser(t *testing.T) {
	u := newUseClient(t, &nodev1.ClaimSandboxRequest{})
	user := access.Acting{Principal: "kubernetes-user:ann", Role: access.RoleUser, Namespaces: []sandbox.Namespace{"default"}}
	s := managertest.Must(remote.New(remote.As(u.conn, user)).Use(t.Context(), u.key))(t)
	defer s.Close()
	u.works(s)
}

// TestUseEnded: a stream is of one sandbox, and ends with it, also where another one has its
// name.
func TestUseEnded(t *testing.T) {
	u := newUseClient(t, &nodev1.ClaimSandboxRequest{})
	s := u.use()
	was := s.Record().ID
	managertest.Must(u.KillSandbox(u.ctx, &nodev1.KillSandboxRequest{Name: "a"}))(t)
	managertest.Must(u.ClaimSandbox(u.ctx, &nodev1.ClaimSandboxRequest{Name: "a", Pool: "pool"}))(t)
	if out, err := shell(t.Context(), s, "echo ghost"); err == nil {
		t.Errorf("%q of a sandbox that has ended", out)
	}
	<-s.Agent().Done()
	again := u.use()
	if again.Record().ID == was {
		t.Error("a session of the one that has ended")
	}
	u.works(again)
}

// TestUseRevoked: a principal that loses its rights is cut off, together with its
// calls under way.
func TestUseRevoked(t *testing.T) {
	who, revoke := context.WithCancel(t.Context())
	var auth asked
	auth.Store(&access.Principal{Name: "key:test", Role: access.RoleAdmin, Namespaces: []sandbox.Namespace{access.AllNamespaces}, Until: who})
	u := newUseClient(t, &nodev1.ClaimSandboxRequest{}, func(cfg *server.Config) { cfg.Authenticator = &auth })
	s := u.use()
	x := managertest.Must(s.Agent().Exec(t.Context(), guestrpc.ExecRequest{Argv: []string{"cat"}, Stdin: true}))(t)
	revoke()
	if _, err := x.Wait(); err == nil {
		t.Error("the call goes on")
	}
	<-s.Agent().Done()
	u.Eventually(func() bool { // its use has ended as well
		_, err := u.Manager.Hibernate(t.Context(), u.key)
		return err == nil
	})
}

// TestUseStalled: a client that does not read a stream holds up neither others on its
// connection nor others in the sandbox, and is cut off.
func TestUseStalled(t *testing.T) {
	u := newUseClient(t, &nodev1.ClaimSandboxRequest{}, func(cfg *server.Config) { cfg.StallTimeout = time.Second })
	stalled := managertest.Must(u.UseSandbox(u.ctx))(t)
	if err := stalled.Send(open("a")); err != nil {
		t.Fatal(err)
	}
	gate := &gated{stream: stalled, pass: make(chan struct{}, 1000)}
	for range 3 { // the sandbox, the hello, and the answer to the next message
		gate.pass <- struct{}{}
	}
	agent := managertest.Must(guestrpc.NewClient(t.Context(), gate))(t)
	x := managertest.Must(agent.Exec(t.Context(), guestrpc.ExecRequest{Argv: []string{"/bin/sh", "-c", "yes"}}))(t)
	go func() { _, _ = x.Copy(nil, io.Discard, io.Discard) }() // as far as anything comes
	s := u.use()
	for range 20 {
		u.works(s)
	}
	managertest.Must(u.GetNode(u.ctx, &nodev1.GetNodeRequest{}))(t)
	u.Eventually(func() bool { // the stream is cut off, and its call with it
		return slices.ContainsFunc(u.Events(), func(e audit.Event) bool {
			return e.Verb == "grpc:UseSandbox" && e.Stage == audit.End
		})
	})
	u.works(s)
	for range 900 {
		gate.pass <- struct{}{}
	}
	<-agent.Done()
}

// gated is a stream that reads one message for each value in pass.
type gated struct {
	stream nodev1.Node_UseSandboxClient
	pass   chan struct{}
	rest   []byte
}

func (g *gated) Read(p []byte) (int, error) {
	for len(g.rest) == 0 {
		<-g.pass
		m, err := g.stream.Recv()
		if err != nil {
			return 0, err
		}
		g.rest = m.GetData()
	}
	n := copy(p, g.rest)
	g.rest = g.rest[n:]
	return n, nil
}

func (g *gated) Write(p []byte) (int, error) {
	return len(p), g.stream.Send(data(p))
}

func (g *gated) Close() error { return nil }

// TestUseFlood: a client that asks for more answers than it may wait for, and receives none
// of them, is cut off.
func TestUseFlood(t *testing.T) {
	u := newUseClient(t, &nodev1.ClaimSandboxRequest{}, func(cfg *server.Config) { cfg.StallTimeout = time.Second })
	other := u.use()
	s := managertest.Must(u.UseSandbox(u.ctx))(t)
	if err := s.Send(open("a")); err != nil {
		t.Fatal(err)
	}
	for number := uint64(1); ; number++ {
		if err := s.Send(&nodev1.UseSandboxRequest{Request: &nodev1.UseSandboxRequest_Wake{Wake: number}}); err != nil {
			break // it ends, and not this test's patience
		}
	}
	u.works(other)
}

// TestUseAudited: each call on a stream is recorded as its operation, with both names. A
// call that cannot be recorded is not done.
func TestUseAudited(t *testing.T) {
	var full sync.Map
	var log server.Auditor
	u := newUseClient(t, &nodev1.ClaimSandboxRequest{}, func(cfg *server.Config) {
		log = cfg.Audit
		cfg.Audit = managertest.Auditor(func(e audit.Event) error {
			if _, is := full.Load("full"); is {
				return managertest.FullDisk(e)
			}
			return log.Write(e)
		})
	})
	s := u.use()
	before := len(u.Events())
	u.works(s)
	var stages []audit.Stage
	u.Eventually(func() bool {
		stages = nil
		for _, e := range u.Events()[before:] {
			if e.Verb != "grpc:exec" {
				continue
			}
			if e.Principal != "gateway-key:aaaaaaaaaaaa" || e.Via != "gateway:g" || e.Namespace != "default" || e.Object != "a" {
				t.Errorf("%+v", e)
			}
			stages = append(stages, e.Stage)
		}
		return len(stages) == 2
	})
	if !slices.Equal(stages, []audit.Stage{audit.Start, audit.End}) {
		t.Errorf("%v", stages)
	}
	full.Store("full", true)
	if out, err := shell(t.Context(), s, "echo unseen"); err == nil {
		t.Errorf("%q was done and not written down", out)
	}
}

// TestUseShutdown: a stream without calls does not keep a daemon from ending; a call that is
// under way is finished.
func TestUseShutdown(t *testing.T) {
	u := newUseClient(t, &nodev1.ClaimSandboxRequest{})
	held := managertest.Must(u.UseSandbox(u.ctx))(t)
	if err := held.Send(open("a")); err != nil {
		t.Fatal(err)
	}
	managertest.Must(held.Recv())(t)
	s := u.use()
	x := managertest.Must(s.Agent().Exec(t.Context(), guestrpc.ExecRequest{Argv: []string{"cat"}, Stdin: true}))(t)
	down := make(chan struct{})
	go func() {
		defer close(down)
		u.server.Shutdown(context.WithoutCancel(t.Context())) // without an end
	}()
	_, err := held.Recv()
	wantRefused(t, err, codes.Unavailable, "shutting_down", "Open the stream again")
	if _, err := io.WriteString(x.Stdin(), "last words"); err != nil {
		t.Error(err)
	}
	if err := x.Stdin().Close(); err != nil {
		t.Error(err)
	}
	var out bytes.Buffer
	if _, err := x.Copy(nil, &out, io.Discard); err != nil || out.String() != "last words" {
		t.Errorf("%q, %v", out.String(), err)
	}
	<-down
}

// TestUsePort: a connection to a port carries bytes both ways, and counts as those over REST.
func TestUsePort(t *testing.T) {
	u := newUseClient(t, &nodev1.ClaimSandboxRequest{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	go func() { // echoes until the listener is closed
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(conn, conn)
				_ = conn.Close()
			}()
		}
	}()
	s, port := u.use(), uint16(l.Addr().(*net.TCPAddr).Port)
	conn := managertest.Must(s.Connect(t.Context(), port))(t)
	sent := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	go func() {
		_, _ = conn.Write(sent)
		_ = conn.CloseWrite()
	}()
	if got, err := io.ReadAll(conn); err != nil || !bytes.Equal(got, sent) {
		t.Errorf("%d of %d bytes, %v", len(got), len(sent), err)
	}
	<-conn.Done()
	_ = conn.Close()
	direct := managertest.Must(u.Manager.Use(t.Context(), u.key))(t)
	defer direct.Close()
	var conns []io.Closer
	u.Eventually(func() bool { // the one before may be counted still
		for {
			conn, err := s.Connect(t.Context(), port)
			if err != nil {
				return sandbox.HasCode(err, sandbox.CodeCapacity)
			}
			conns = append(conns, conn)
		}
	})
	if len(conns) > guestrpc.MaxStreams/2 {
		t.Errorf("%d connections", len(conns))
	}
	if _, err := direct.Connect(t.Context(), port); !sandbox.HasCode(err, sandbox.CodeCapacity) {
		t.Errorf("one more over the node: %v", err)
	}
	for _, conn := range conns {
		_ = conn.Close()
	}
}

// TestFindOthers: ids, tokens and secrets of other namespaces get the same answers as missing
// ones.
func TestFindOthers(t *testing.T) {
	u := newUseClient(t, &nodev1.ClaimSandboxRequest{})
	id := string(u.use().Record().ID)
	for name, c := range map[string]struct {
		namespace string
		code      codes.Code
	}{"others": {"other", codes.NotFound}, "own": {"default", codes.OK}} {
		t.Run(name, func(t *testing.T) {
			ctx := acting(t, "agentrun-principal", "gateway-key:bbbbbbbbbbbb", "agentrun-role", "user", "agentrun-namespaces", c.namespace)
			_, err := u.GetSandboxByID(ctx, &nodev1.GetSandboxByIDRequest{Id: id})
			if got, _ := details(err); got != c.code {
				t.Errorf("by id: %v", err)
			}
			w := managertest.Must(u.WatchToken(ctx, &nodev1.WatchTokenRequest{Token: &nodev1.WatchTokenRequest_Derived{Derived: id}}))(t)
			_, err = w.Recv()
			if got, _ := details(err); got != c.code {
				t.Errorf("by token: %v", err)
			}
		})
	}
	w := managertest.Must(u.WatchToken(u.ctx, &nodev1.WatchTokenRequest{}))(t)
	_, err := w.Recv()
	wantRefused(t, err, codes.InvalidArgument, "invalid", "derived")
	w = managertest.Must(u.WatchToken(u.ctx, &nodev1.WatchTokenRequest{Token: &nodev1.WatchTokenRequest_TokenSha256{TokenSha256: "ars_secret"}}))(t)
	_, err = w.Recv()
	wantRefused(t, err, codes.InvalidArgument, "invalid", "hash")
	if strings.Contains(err.Error(), "ars_secret") {
		t.Error("the token is in the error")
	}
}

// TestSecretsOverGRPC: no answer has values, reading names is recorded, and secrets of
// other namespaces do not exist.
func TestSecretsOverGRPC(t *testing.T) {
	c := newGatewayClient(t)
	made := managertest.Must(c.ApplySecret(c.ctx, &nodev1.ApplySecretRequest{Name: "s", Data: map[string][]byte{"KEY": []byte("plain-value")}}))(t)
	if strings.Contains(made.String(), "plain-value") || !slices.Equal(made.GetKeys(), []string{"KEY"}) {
		t.Errorf("%v", made)
	}
	before := len(c.Events())
	managertest.Must(c.GetSecret(c.ctx, &nodev1.GetSecretRequest{Name: "s"}))(t)
	managertest.Must(c.ListSecrets(c.ctx, &nodev1.ListSecretsRequest{}))(t)
	var verbs []string
	for _, e := range c.Events()[before:] {
		if e.Stage == audit.End {
			verbs = append(verbs, e.Verb)
		}
	}
	if !slices.Equal(verbs, []string{"grpc:GetSecret", "grpc:ListSecrets"}) {
		t.Errorf("%v", verbs)
	}
	other := acting(t, "agentrun-principal", "gateway-key:bbbbbbbbbbbb", "agentrun-role", "user", "agentrun-namespaces", "other")
	_, err := c.GetSecret(other, &nodev1.GetSecretRequest{Name: "s"})
	wantRefused(t, err, codes.NotFound, "not_found", "s")
	_, err = c.SetQuota(other, &nodev1.SetQuotaRequest{Namespace: "other"})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "putQuota is not for the role user")
	_, err = c.ApplySecret(c.ctx, &nodev1.ApplySecretRequest{Name: "s", Data: map[string][]byte{"KEY": bytes.Repeat([]byte("x"), sandbox.MaxSecretValue+1)}})
	wantRefused(t, err, codes.InvalidArgument, "invalid", "KEY")
}

// TestIdentityIsOfPrincipal: the identity of one principal's request is not another's, and is
// not there beside an idempotency key.
func TestIdentityIsOfPrincipal(t *testing.T) {
	c := newGatewayClient(t)
	c.prepare("default")
	o := sandbox.NewOnce("", "", "key", nil)
	ask := func(name string) *nodev1.ClaimSandboxRequest {
		return &nodev1.ClaimSandboxRequest{Name: name, Pool: "pool", Identity: &nodev1.RequestIdentity{Key: o.Key, Body: o.Body}}
	}
	first := managertest.Must(c.ClaimSandbox(c.ctx, ask("a")))(t)
	other := acting(t, "agentrun-principal", "gateway-key:bbbbbbbbbbbb", "agentrun-role", "admin")
	if second := managertest.Must(c.ClaimSandbox(other, ask("b")))(t); second.GetId() == first.GetId() {
		t.Error("another principal has got the answer of the first one")
	}
	both := ask("c")
	both.IdempotencyKey = "x"
	_, err := c.ClaimSandbox(c.ctx, both)
	wantRefused(t, err, codes.InvalidArgument, "invalid", "leave one")
	bad := ask("c")
	bad.Identity.Key = "x"
	_, err = c.ClaimSandbox(c.ctx, bad)
	wantRefused(t, err, codes.InvalidArgument, "invalid", "identity")
}

// FuzzUseMessage: each message on a stream is refused or is at most a frame of bytes for the
// session.
func FuzzUseMessage(f *testing.F) {
	for _, m := range []*nodev1.UseSandboxRequest{
		open("a"), data([]byte("AGRUNRPC")), data(make([]byte, maxData+1)), unknown(data([]byte("x"))), {},
		{Request: &nodev1.UseSandboxRequest_Wake{Wake: 1}},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var m nodev1.UseSandboxRequest
		if proto.Unmarshal(b, &m) != nil {
			return
		}
		s := &useStream{using: &using{closing: true}} // wakes nothing
		err := s.received(&m)
		switch _, wakes := m.GetRequest().(*nodev1.UseSandboxRequest_Wake); {
		case err == nil && (len(s.rest) == 0 || len(s.rest) > maxData):
			t.Errorf("%d bytes are taken", len(s.rest))
		case err != nil && !sandbox.HasCode(err, sandbox.CodeInvalid) && !wakes:
			t.Errorf("%v", err)
		}
	})
}
