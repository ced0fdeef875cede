package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// unknown adds an unknown field to a message.
func unknown[T proto.Message](m T) T {
	m.ProtoReflect().SetUnknown([]byte{0xfa, 0x3f, 1, 'x'})
	return m
}

// TestNodeHostile: each call gets the right refusal, with the reason.
func TestNodeHostile(t *testing.T) {
	c := newNodeClient(t)
	c.prepare("default")
	managertest.Must(c.ClaimSandbox(c.ctx, &nodev1.ClaimSandboxRequest{Name: "a", Pool: "pool"}))(t)
	claim := func(r *nodev1.ClaimSandboxRequest) func() error {
		return func() error { _, err := c.ClaimSandbox(c.ctx, r); return err }
	}
	apply := func(s *nodev1.TemplateSpec) func() error {
		return func() error {
			_, err := c.ApplyTemplate(c.ctx, &nodev1.ApplyTemplateRequest{Name: "x", Spec: s})
			return err
		}
	}
	watching := func(r *nodev1.WatchRequest) func() error {
		return func() error {
			w, err := c.Watch(c.ctx, r)
			if err == nil {
				_, err = w.Recv()
			}
			return err
		}
	}
	big := strings.Repeat("x", 2<<20)
	kill := func(p *nodev1.Precondition) func() error {
		return func() error {
			_, err := c.KillSandbox(c.ctx, &nodev1.KillSandboxRequest{Name: "a", Precondition: p})
			return err
		}
	}
	fork := func(replicas uint32, children ...*nodev1.ForkChild) func() error {
		return func() error {
			_, err := c.ForkSandbox(c.ctx, &nodev1.ForkSandboxRequest{Source: "a", Name: "f", Replicas: replicas, Children: children})
			return err
		}
	}
	release := func(owner string) func() error {
		return func() error {
			_, err := c.ReleaseOwner(c.ctx, &nodev1.ReleaseOwnerRequest{Owner: owner})
			return err
		}
	}
	for name, try := range map[string]struct {
		do        func() error
		code      codes.Code
		own, says string
	}{
		"no pool":             {claim(&nodev1.ClaimSandboxRequest{}), codes.InvalidArgument, "invalid", "name"},
		"no such pool":        {claim(&nodev1.ClaimSandboxRequest{Pool: "nobody"}), codes.NotFound, "not_found", "nobody"},
		"a name that climbs":  {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Name: "../x"}), codes.InvalidArgument, "invalid", "name"},
		"a namespace too":     {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Namespace: ".."}), codes.InvalidArgument, "invalid", "namespace"},
		"a name that is used": {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Name: "a"}), codes.AlreadyExists, "already_exists", "exists"},
		"NUL":                 {claim(&nodev1.ClaimSandboxRequest{Pool: "po\x00ol"}), codes.InvalidArgument, "invalid", "NUL"},
		"NUL in a map":        {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Env: map[string]string{"A": "\x00"}}), codes.InvalidArgument, "invalid", "env"},
		"NUL in a key":        {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Metadata: map[string]string{"\x00": ""}}), codes.InvalidArgument, "invalid", "metadata"},
		"NUL in a list":       {apply(&nodev1.TemplateSpec{Image: "x", Init: []string{"a", "b\x00"}}), codes.InvalidArgument, "invalid", "init"},
		"a bad variable":      {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Env: map[string]string{"A B": ""}}), codes.InvalidArgument, "invalid", "A B"},
		"an unknown field":    {claim(unknown(&nodev1.ClaimSandboxRequest{Pool: "pool"})), codes.InvalidArgument, "invalid", "does not know"},
		"one inside":          {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Lifetime: unknown(&nodev1.Lifetime{})}), codes.InvalidArgument, "invalid", "Lifetime"},
		"an unknown value":    {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Lifetime: &nodev1.Lifetime{OnTimeout: 99}}), codes.InvalidArgument, "invalid", "on_timeout"},
		"a negative time":     {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Lifetime: &nodev1.Lifetime{Timeout: durationpb.New(-1)}}), codes.InvalidArgument, "invalid", "timeout"},
		"a time too long":     {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Lifetime: &nodev1.Lifetime{IdleTimeout: &durationpb.Duration{Seconds: math.MaxInt64}}}), codes.InvalidArgument, "invalid", "idle_timeout"},
		"300 years":           {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Lifetime: &nodev1.Lifetime{Timeout: &durationpb.Duration{Seconds: 300 * 365 * 86400}}}), codes.InvalidArgument, "invalid", "timeout"},
		"too large":           {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Metadata: map[string]string{"k": big}}), codes.ResourceExhausted, "too_large", "bytes"},
		"no spec":             {apply(nil), codes.InvalidArgument, "invalid", "image"},
		"a port too large":    {apply(&nodev1.TemplateSpec{Image: "x", Ready: &nodev1.ReadyCheck{Check: &nodev1.ReadyCheck_Port{Port: 65536}}}), codes.InvalidArgument, "invalid", "port"},
		"memory too large":    {apply(&nodev1.TemplateSpec{Image: "x", MemoryBytes: math.MaxUint64}), codes.InvalidArgument, "invalid", "memory"},
		"a huge init":         {apply(&nodev1.TemplateSpec{Image: "x", Init: []string{big}}), codes.InvalidArgument, "invalid", "init"},
		"too many replicas": {func() error {
			_, err := c.ApplyPool(c.ctx, &nodev1.ApplyPoolRequest{Name: "p", Spec: &nodev1.PoolSpec{Template: "python", Replicas: math.MaxUint32}})
			return err
		}, codes.InvalidArgument, "invalid", "replicas"},
		"too many forks": {func() error {
			_, err := c.ForkSandbox(c.ctx, &nodev1.ForkSandboxRequest{Source: "a", Replicas: math.MaxUint32})
			return err
		}, codes.InvalidArgument, "invalid", "replicas"},
		"no timeout": {func() error {
			_, err := c.ExtendSandbox(c.ctx, &nodev1.ExtendSandboxRequest{Name: "a"})
			return err
		}, codes.InvalidArgument, "invalid", "timeout"},
		"a timeout and an end time": {func() error {
			_, err := c.ExtendSandbox(c.ctx, &nodev1.ExtendSandboxRequest{Name: "a", Timeout: durationpb.New(1), Expires: timestamppb.Now()})
			return err
		}, codes.InvalidArgument, "invalid", "either"},
		"an end time that has passed": {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Lifetime: &nodev1.Lifetime{Expires: timestamppb.Now()}}), codes.InvalidArgument, "invalid", "has passed"},
		"an end time in the year 1":   {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Lifetime: &nodev1.Lifetime{Expires: timestamppb.New(time.Time{})}}), codes.InvalidArgument, "invalid", "lifetime.expires"},
		"an end time after all years": {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Lifetime: &nodev1.Lifetime{Expires: &timestamppb.Timestamp{Seconds: math.MaxInt64}}}), codes.InvalidArgument, "invalid", "lifetime.expires"},
		"an owner that climbs":        {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Name: "o", Owner: "../default/x"}), codes.InvalidArgument, "invalid", "owner"},
		"an owner too long":           {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Name: "o", Owner: strings.Repeat("a", 65)}), codes.InvalidArgument, "invalid", "1 to 64"},
		"an owner without a name":     {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Owner: "a"}), codes.InvalidArgument, "invalid", "name"},
		"an owner and a key":          {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", Name: "o", Owner: "a", IdempotencyKey: "k"}), codes.InvalidArgument, "invalid", "idempotency key"},
		"a token instead of its hash": {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", TokenSha256: "ars_secret"}), codes.InvalidArgument, "invalid", "the hash of the token is not valid"},
		"a hash in capitals":          {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", TokenSha256: strings.Repeat("A", 64)}), codes.InvalidArgument, "invalid", "the hash of the token is not valid"},
		"a value with a NUL":          {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", SecretValues: map[string][]byte{"A": {0}}}), codes.InvalidArgument, "invalid", "NUL"},
		"a value too large":           {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", SecretValues: map[string][]byte{"A": make([]byte, 33<<10)}}), codes.InvalidArgument, "invalid", "bytes"},
		"too many values": {claim(&nodev1.ClaimSandboxRequest{Pool: "pool", SecretValues: func() map[string][]byte {
			out := map[string][]byte{}
			for i := range 65 {
				out[fmt.Sprintf("A%d", i)] = nil
			}
			return out
		}()}), codes.InvalidArgument, "invalid", "64"},
		"an owner of a template that is none": {func() error {
			_, err := c.ApplyTemplate(c.ctx, &nodev1.ApplyTemplateRequest{Name: "o", Spec: &nodev1.TemplateSpec{Image: "x"}, Owner: "a b"})
			return err
		}, codes.InvalidArgument, "invalid", "owner"},
		"an id that is none":                 {kill(&nodev1.Precondition{Id: "../a"}), codes.InvalidArgument, "invalid", "id"},
		"an id of nobody":                    {kill(&nodev1.Precondition{Id: strings.Repeat("a", 20)}), codes.FailedPrecondition, "conflict", "not the one"},
		"an owner of nobody":                 {kill(&nodev1.Precondition{Owner: "nobody"}), codes.FailedPrecondition, "conflict", "no owner"},
		"a version to come":                  {kill(&nodev1.Precondition{ResourceVersion: math.MaxUint64}), codes.FailedPrecondition, "conflict", "resource version"},
		"an unknown field of a precondition": {kill(unknown(&nodev1.Precondition{})), codes.InvalidArgument, "invalid", "does not know"},
		"children that are fewer":            {fork(2, &nodev1.ForkChild{}), codes.InvalidArgument, "invalid", "1 of them, and 2 replicas"},
		"a child that climbs":                {fork(1, &nodev1.ForkChild{Name: "../a"}), codes.InvalidArgument, "invalid", "name"},
		"children with one name":             {fork(2, &nodev1.ForkChild{Name: "b"}, &nodev1.ForkChild{Name: "b"}), codes.InvalidArgument, "invalid", "the name b"},
		"children, one owned":                {fork(2, &nodev1.ForkChild{Owner: "b"}, &nodev1.ForkChild{}), codes.InvalidArgument, "invalid", "owner"},
		"a child's token":                    {fork(1, &nodev1.ForkChild{TokenSha256: "ars_x"}), codes.InvalidArgument, "invalid", "the hash of the token is not valid"},
		"an unknown field of one":            {fork(1, unknown(&nodev1.ForkChild{})), codes.InvalidArgument, "invalid", "does not know"},
		"a fork of nobody's name": {func() error {
			_, err := c.ForkSandbox(c.ctx, &nodev1.ForkSandboxRequest{Source: "a", Replicas: 1, Children: []*nodev1.ForkChild{{Owner: "b"}}})
			return err
		}, codes.InvalidArgument, "invalid", "must give one"},
		"no token": {func() error {
			_, err := c.SetSandboxToken(c.ctx, &nodev1.SetSandboxTokenRequest{Name: "a"})
			return err
		}, codes.InvalidArgument, "invalid", "the hash of the token is not valid"},
		"releasing nothing":  {release(""), codes.InvalidArgument, "invalid", "owner"},
		"releasing a nobody": {release("nobody"), codes.NotFound, "not_found", "nobody"},
		"a page too large": {func() error {
			_, err := c.ListSandboxes(c.ctx, &nodev1.ListSandboxesRequest{Limit: 1001})
			return err
		}, codes.InvalidArgument, "invalid", "limit"},
		"a namespace and all": {func() error {
			w, err := c.Watch(c.ctx, &nodev1.WatchRequest{Namespace: "x", AllNamespaces: true})
			if err == nil {
				_, err = w.Recv()
			}
			return err
		}, codes.InvalidArgument, "invalid", "all_namespaces"},
		"a namespace and a list of all": {func() error {
			_, err := c.ListPools(c.ctx, &nodev1.ListPoolsRequest{Namespace: "x", AllNamespaces: true})
			return err
		}, codes.InvalidArgument, "invalid", "all_namespaces"},
		"ended ones of all namespaces": {func() error {
			_, err := c.ListSandboxes(c.ctx, &nodev1.ListSandboxesRequest{AllNamespaces: true, Ended: true})
			return err
		}, codes.InvalidArgument, "invalid", "ended"},
		"a watch from the future":             {watching(&nodev1.WatchRequest{ResourceVersion: 1 << 60}), codes.FailedPrecondition, "other_state", "in the future"},
		"a watch of another state folder":     {watching(&nodev1.WatchRequest{ResourceVersion: 1, StateId: "OTHER"}), codes.FailedPrecondition, "other_state", "state folder"},
		"a watch of no kind":                  {watching(&nodev1.WatchRequest{Kinds: []nodev1.ObjectKind{0}}), codes.InvalidArgument, "invalid", "kinds"},
		"a watch of a kind that is not known": {watching(&nodev1.WatchRequest{Kinds: []nodev1.ObjectKind{99}}), codes.InvalidArgument, "invalid", "kinds"},
		"an unknown field of a watch": {func() error {
			w, err := c.Watch(c.ctx, unknown(&nodev1.WatchRequest{}))
			if err == nil {
				_, err = w.Recv()
			}
			return err
		}, codes.InvalidArgument, "invalid", "does not know"},
		// These are refused before they are looked at.
		"larger than anything": {apply(&nodev1.TemplateSpec{Image: strings.Repeat("x", maxLarge)}), codes.ResourceExhausted, "", ""},
		"no such method": {func() error {
			return c.conn.Invoke(c.ctx, "/agentrun.node.v1.Node/Explode", &emptypb.Empty{}, &emptypb.Empty{})
		}, codes.Unimplemented, "", ""},
		"no message": {func() error {
			return c.conn.Invoke(c.ctx, nodev1.Node_GetPool_FullMethodName, garbage{}, &emptypb.Empty{}, grpc.ForceCodec(garbage{}))
		}, codes.Internal, "", ""},
	} {
		t.Run(name, func(t *testing.T) { wantRefused(t, try.do(), try.code, try.own, try.says) })
	}
	managertest.Must(c.GetNode(c.ctx, &nodev1.GetNodeRequest{}))(t)
}

// garbage is sent as bytes that are no message.
type garbage struct{}

func (garbage) Marshal(any) ([]byte, error) {
	return []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, nil
}
func (garbage) Unmarshal([]byte, any) error { return nil }
func (garbage) Name() string                { return "proto" }

// panics is a service with a defect.
type panics struct{ server.Service }

func (panics) Pools(context.Context, sandbox.Namespace, sandbox.Page) ([]sandbox.Pool, error) {
	panic("a secret")
}

// TestNodePanic: the client gets an error, the panic is logged, and the daemon
// goes on.
func TestNodePanic(t *testing.T) {
	var logged managertest.Log
	c := newNodeClient(t, func(c *server.Config) {
		c.Service = panics{c.Service}
		c.Log = slog.New(slog.NewTextHandler(&logged, nil))
	})
	_, err := c.ListPools(c.ctx, &nodev1.ListPoolsRequest{})
	wantRefused(t, err, codes.Internal, "internal", "defect")
	if _, d := details(err); strings.Contains(d.String(), "secret") {
		t.Errorf("%v", d)
	}
	managertest.Must(c.GetNode(c.ctx, &nodev1.GetNodeRequest{}))(t)
	if !strings.Contains(logged.String(), "a secret") || !strings.Contains(logged.String(), "hostile_test.go") || !strings.Contains(logged.String(), "principal=uid:") {
		t.Errorf("%s", logged.String())
	}
}

// TestNodePeer: of the users at the other end of a Unix socket, only the daemon's
// user and root are let in.
func TestNodePeer(t *testing.T) {
	for name, c := range map[string]struct {
		info credentials.AuthInfo
		want sandbox.Code
	}{
		"nobody":       {nil, access.CodeUnauthenticated},
		"another user": {peerUser{uid: 4711}, sandbox.CodeDenied},
		"root":         {peerUser{uid: 0}, ""},
	} {
		n := &nodeAPI{Config: server.Config{Authenticator: access.Authenticator{}}}
		_, err := n.principal(peer.NewContext(t.Context(), &peer.Peer{AuthInfo: c.info}))
		if c.want == "" && err != nil || c.want != "" && !sandbox.HasCode(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	ours, theirs := net.Pipe()
	defer ours.Close()
	defer theirs.Close()
	if _, _, err := (peerCredentials{}).ServerHandshake(theirs); err == nil {
		t.Error("what is no Unix socket was taken")
	}
}

// TestNodeSlow: the call of a client that sends no request, or does not receive
// its answers, is ended.
func TestNodeSlow(t *testing.T) {
	for name, connect := range map[string]func(testing.TB, ...func(*server.Config)) *nodeClient{"socket": newNodeClient, "mutual TLS": newGatewayClient} {
		t.Run(name, func(t *testing.T) {
			var logged managertest.Log
			testSlow(t, &logged, connect(t, func(c *server.Config) {
				// Long enough for clients that are not slow on a machine that
				// is.
				c.BodyTimeout, c.StallTimeout = 500*time.Millisecond, 500*time.Millisecond
				c.Log = slog.New(slog.NewTextHandler(&logged, nil))
			}))
		})
	}
}

func testSlow(t *testing.T, logged *managertest.Log, c *nodeClient) {
	c.prepare("default")
	c.prepare("other")
	idle := managertest.Must(c.Watch(c.ctx, &nodev1.WatchRequest{Namespace: "other", Kinds: []nodev1.ObjectKind{nodev1.ObjectKind_OBJECT_KIND_SANDBOX}}))(t)
	managertest.Must(idle.Recv())(t)
	silent, err := c.conn.NewStream(c.ctx, &grpc.StreamDesc{ClientStreams: true}, nodev1.Node_GetNode_FullMethodName)
	if err != nil {
		t.Fatal(err)
	}
	if err := silent.RecvMsg(&nodev1.NodeStatus{}); err == nil {
		t.Error("who sends nothing is answered")
	}
	// More than HTTP/2 lets a server send ahead.
	large := map[string]string{}
	for _, k := range strings.Split("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", "") {
		large[k] = strings.Repeat("x", 4096)
	}
	for _, name := range []string{"a", "b", "c", "d"} {
		// Not over the connection: so large a request is not to be sent in time.
		ask := sandbox.ClaimRequest{Key: sandbox.Key{Namespace: "default", Name: sandbox.Name(name)}, Spec: sandbox.ClaimSpec{Pool: "pool", Metadata: large}}
		if _, _, err := c.Manager.Claim(t.Context(), ask); err != nil {
			t.Fatal(err)
		}
	}
	stalled := managertest.Must(c.Watch(c.ctx, &nodev1.WatchRequest{Kinds: []nodev1.ObjectKind{nodev1.ObjectKind_OBJECT_KIND_SANDBOX}}))(t)
	c.Eventually(func() bool { return strings.Contains(logged.String(), "node.v1.Node/Watch") }) // it has ended
	for err = nil; err == nil; {
		_, err = stalled.Recv()
	}
	// A client that has waited between two events for longer than both is not
	// slow.
	managertest.Must(c.ClaimSandbox(c.ctx, &nodev1.ClaimSandboxRequest{Namespace: "other", Name: "e", Pool: "pool"}))(t)
	if e := managertest.Must(idle.Recv())(t); e.GetSandbox().GetName() != "e" {
		t.Errorf("%v", e)
	}
}

// FuzzNodeMessage: all bytes are refused or read.
func FuzzNodeMessage(f *testing.F) {
	for _, m := range []proto.Message{
		&nodev1.ApplyTemplateRequest{Name: "x", Spec: &nodev1.TemplateSpec{Image: "x", Init: []string{"a"}, Env: map[string]string{"A": "b"}}},
		&nodev1.ApplyTemplateRequest{Spec: &nodev1.TemplateSpec{Ready: &nodev1.ReadyCheck{Check: &nodev1.ReadyCheck_Delay{Delay: durationpb.New(1)}}}},
		unknown(&nodev1.ApplyTemplateRequest{Name: "\x00"}),
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var r nodev1.ApplyTemplateRequest
		if proto.Unmarshal(data, &r) != nil {
			return
		}
		if err := checkMessage(nodev1.Node_ApplyTemplate_FullMethodName, &r); err != nil {
			if e := server.ToError(err); e.Code != sandbox.CodeInvalid && e.Code != server.CodeTooLarge {
				t.Errorf("%v", err)
			}
			return
		}
		spec, err := nodeconv.ToTemplateSpec(r.GetSpec())
		if err != nil {
			return
		}
		if strings.Contains(spec.Image+strings.Join(spec.Init, "")+spec.Workdir, "\x00") || spec.Ready != nil && spec.Ready.Delay < 0 {
			t.Errorf("%+v", spec)
		}
	})
}

// TestNodeCodes: every code of a service has a code of gRPC, and so do the
// refusals of the server. Codes of files, programs and HTTP never occur.
func TestNodeCodes(t *testing.T) {
	never := []sandbox.Code{server.CodeFileDenied, server.CodeNoFile, server.CodeFileExists, server.CodeMethod, server.CodeAccept, server.CodeMedia, server.CodeCannotRun, sandbox.CodePortClosed}
	for _, code := range server.Codes() {
		if _, known := grpcCodes[code]; known == slices.Contains(never, code) {
			t.Errorf("%s: it has a code of gRPC: %t", code, known)
		}
	}
	for err, want := range map[error]codes.Code{
		context.Canceled: codes.Canceled, context.DeadlineExceeded: codes.DeadlineExceeded, errors.New("x"): codes.Internal,
		sandbox.Errorf(sandbox.CodeCapacity, "full").Try("Wait"): codes.ResourceExhausted,
	} {
		st := grpcStatus(err)
		if _, d := details(st.Err()); st.Code() != want || d.GetMessage() == "" || d.GetCode() == "" {
			t.Errorf("%v: %v %v", err, st, d)
		}
	}
}
