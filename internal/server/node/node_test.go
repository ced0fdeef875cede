package node

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/server"
)

// nodeClient speaks gRPC to a daemon over its socket.
type nodeClient struct {
	*managertest.Node
	nodev1.NodeClient
	conn   *grpc.ClientConn
	server *Server
	ctx    context.Context
}

func newNodeClient(t testing.TB, change ...func(*server.Config)) *nodeClient {
	t.Helper()
	c := &nodeClient{Node: managertest.New(t), ctx: t.Context()}
	cfg := c.Config()
	for _, do := range change {
		do(&cfg)
	}
	socket := filepath.Join(t.TempDir(), "n")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	c.server = New(cfg)
	served := make(chan error, 1)
	go func() { served <- c.server.Serve(l) }()
	if c.conn, err = grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), window); err != nil {
		t.Fatal(err)
	}
	c.NodeClient = nodev1.NewNodeClient(c.conn)
	t.Cleanup(func() {
		_ = c.conn.Close() // a test may have closed it
		c.server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return c
}

// window bounds how many bytes are sent ahead to a client that receives none. gRPC would
// raise it more and more if it finds that bytes take long, as on a busy machine.
var window = grpc.WithStaticStreamWindowSize(64 << 10)

// details returns the details of an error.
func details(err error) (codes.Code, *nodev1.Error) {
	st := status.Convert(err)
	for _, d := range st.Details() {
		if e, ok := d.(*nodev1.Error); ok {
			return st.Code(), e
		}
	}
	return st.Code(), &nodev1.Error{}
}

// wantRefused requires an error with its details.
func wantRefused(t testing.TB, err error, code codes.Code, own, says string) {
	t.Helper()
	got, d := details(err)
	if all := d.GetMessage() + d.GetCause() + d.GetRemediation(); got != code || d.GetCode() != own || !strings.Contains(all, says) {
		t.Errorf("%v with %v, want %s %s %q", err, d, code, own, says)
	}
}

// prepare makes a template and a pool that is ready, over gRPC.
func (c *nodeClient) prepare(namespace string) {
	c.T.Helper()
	managertest.Must(c.ApplyTemplate(c.ctx, &nodev1.ApplyTemplateRequest{Namespace: namespace, Name: "python", Spec: &nodev1.TemplateSpec{Image: "python"}}))(c.T)
	managertest.Must(c.ApplyPool(c.ctx, &nodev1.ApplyPoolRequest{Namespace: namespace, Name: "pool", Spec: &nodev1.PoolSpec{Template: "python", Replicas: 1}}))(c.T)
	c.Eventually(func() bool {
		return managertest.Must(c.GetPool(c.ctx, &nodev1.GetPoolRequest{Namespace: namespace, Name: "pool"}))(c.T).GetReady() == 1
	})
}

// TestNodeObjects: templates, pools and the node, over gRPC.
func TestNodeObjects(t *testing.T) {
	c := newNodeClient(t)
	spec := &nodev1.TemplateSpec{
		Image: "python", Init: nil, Env: map[string]string{"A": "b"}, Workdir: "/w", User: "me", MilliCpus: 500, MemoryBytes: 64 << 20, DiskBytes: 32 << 20,
		Ready:  &nodev1.ReadyCheck{Check: &nodev1.ReadyCheck_Port{Port: 80}, Timeout: durationpb.New(time.Second)},
		Warmup: &nodev1.Program{Language: "python", Text: "import os"},
	}
	made := managertest.Must(c.ApplyTemplate(c.ctx, &nodev1.ApplyTemplateRequest{Name: "a", Spec: spec}))(t)
	if got := made.GetSpec(); got.GetReady().GetPort() != 80 || got.GetReady().GetTimeout().AsDuration() != time.Second ||
		got.GetMilliCpus() != 500 || got.GetDiskBytes() != 32<<20 || got.GetEnv()["A"] != "b" || got.GetWarmup().GetText() != "import os" || made.GetRevision() == "" || made.GetCreated() == nil {
		t.Errorf("%v", made)
	}
	for check, want := range map[string]*nodev1.ReadyCheck{
		"command": {Check: &nodev1.ReadyCheck_Command{Command: "true"}},
		"delay":   {Check: &nodev1.ReadyCheck_Delay{Delay: durationpb.New(time.Minute)}},
	} {
		got := managertest.Must(c.ApplyTemplate(c.ctx, &nodev1.ApplyTemplateRequest{Name: check, Spec: &nodev1.TemplateSpec{Image: "x", Ready: want}}))(t).GetSpec()
		if got.GetReady().String() != want.String() || got.GetMemoryBytes() != 512<<20 || got.GetMilliCpus() != 1000 {
			t.Errorf("%v, not %v", got, want)
		}
	}
	c.Eventually(func() bool {
		got := managertest.Must(c.GetTemplate(c.ctx, &nodev1.GetTemplateRequest{Name: "a"}))(t)
		return got.GetPhase() == nodev1.Phase_PHASE_READY && len(got.GetBuilds()) == 1 && got.GetBuilds()[0].GetFinished() != nil
	})
	page := managertest.Must(c.ListTemplates(c.ctx, &nodev1.ListTemplatesRequest{Limit: 2}))(t)
	if len(page.GetTemplates()) != 2 || page.GetNext() != "command" {
		t.Errorf("%v", page)
	}
	page = managertest.Must(c.ListTemplates(c.ctx, &nodev1.ListTemplatesRequest{After: page.GetNext()}))(t)
	if len(page.GetTemplates()) != 1 || page.GetNext() != "" || page.GetTemplates()[0].GetName() != "delay" {
		t.Errorf("%v", page)
	}
	p := managertest.Must(c.ApplyPool(c.ctx, &nodev1.ApplyPoolRequest{Name: "p", Spec: &nodev1.PoolSpec{Template: "a", SnapshotAfter: nodev1.Stage_STAGE_INIT}}))(t)
	if p.GetSpec().GetSnapshotAfter() != nodev1.Stage_STAGE_INIT || p.GetSpec().GetTemplate() != "a" {
		t.Errorf("%v", p)
	}
	if l := managertest.Must(c.ListPools(c.ctx, &nodev1.ListPoolsRequest{}))(t); len(l.GetPools()) != 1 {
		t.Errorf("%v", l)
	}
	_, err := c.DeleteTemplate(c.ctx, &nodev1.DeleteTemplateRequest{Name: "a"})
	wantRefused(t, err, codes.FailedPrecondition, "conflict", "pool p")
	managertest.Must(c.DeletePool(c.ctx, &nodev1.DeletePoolRequest{Name: "p"}))(t)
	managertest.Must(c.DeleteTemplate(c.ctx, &nodev1.DeleteTemplateRequest{Name: "a"}))(t)
	_, err = c.GetTemplate(c.ctx, &nodev1.GetTemplateRequest{Name: "a"})
	wantRefused(t, err, codes.NotFound, "not_found", "template a does not exist")
	if n := managertest.Must(c.GetNode(c.ctx, &nodev1.GetNodeRequest{}))(t); n.GetVersion() != "test" || n.GetEngine() != "fake" || n.GetCapacityBytes() != 1<<40 {
		t.Errorf("%v", n)
	}
}

// TestNodeSandboxes: the life of sandboxes, forks and checkpoints, over gRPC.
func TestNodeSandboxes(t *testing.T) {
	c := newNodeClient(t)
	c.prepare("default")
	life := &nodev1.Lifetime{Timeout: durationpb.New(time.Hour), OnTimeout: nodev1.TimeoutAction_TIMEOUT_ACTION_HIBERNATE}
	s := managertest.Must(c.ClaimSandbox(c.ctx, &nodev1.ClaimSandboxRequest{Name: "a", Pool: "pool", Metadata: map[string]string{"k": "v"}, Lifetime: life}))(t)
	if s.GetState() != nodev1.SandboxState_SANDBOX_STATE_RUNNING || s.GetMetadata()["k"] != "v" || s.GetId() == "" || s.GetTemplate() != "python" ||
		s.GetLifetime().String() != life.String() || s.GetMemoryBytes() == 0 {
		t.Errorf("%v", s)
	}
	for _, step := range []struct {
		do   func() (*nodev1.Sandbox, error)
		want nodev1.SandboxState
	}{
		{func() (*nodev1.Sandbox, error) {
			return c.PauseSandbox(c.ctx, &nodev1.PauseSandboxRequest{Name: "a"})
		}, nodev1.SandboxState_SANDBOX_STATE_PAUSED},
		{func() (*nodev1.Sandbox, error) {
			return c.ResumeSandbox(c.ctx, &nodev1.ResumeSandboxRequest{Name: "a"})
		}, nodev1.SandboxState_SANDBOX_STATE_RUNNING},
		{func() (*nodev1.Sandbox, error) {
			return c.HibernateSandbox(c.ctx, &nodev1.HibernateSandboxRequest{Name: "a"})
		}, nodev1.SandboxState_SANDBOX_STATE_HIBERNATED},
		{func() (*nodev1.Sandbox, error) {
			return c.ExtendSandbox(c.ctx, &nodev1.ExtendSandboxRequest{Name: "a", Timeout: durationpb.New(2 * time.Hour)})
		}, nodev1.SandboxState_SANDBOX_STATE_HIBERNATED},
	} {
		if got := managertest.Must(step.do())(t); got.GetState() != step.want {
			t.Errorf("%v, not %s", got, step.want)
		}
	}
	f := managertest.Must(c.ForkSandbox(c.ctx, &nodev1.ForkSandboxRequest{Source: "a", Name: "f", Replicas: 2}))(t)
	if f.GetPhase() != nodev1.Phase_PHASE_READY || len(f.GetChildren()) != 2 || f.GetSourceId() != s.GetId() {
		t.Errorf("%v", f)
	}
	p := managertest.Must(c.CheckpointSandbox(c.ctx, &nodev1.CheckpointSandboxRequest{Source: "a", Name: "c"}))(t)
	if p.GetSourceId() != s.GetId() || p.GetStoredBytes() == 0 || p.GetTemplate() != "python" {
		t.Errorf("%v", p)
	}
	r := managertest.Must(c.RestoreCheckpoint(c.ctx, &nodev1.RestoreCheckpointRequest{Checkpoint: "c", Name: "r", Env: map[string]string{"X": "y"}}))(t)
	if r.GetParent() != s.GetId() || r.GetCheckpoint() != "c" || r.GetLifetime().GetTimeout() != nil {
		t.Errorf("%v", r)
	}
	l := managertest.Must(c.ListSandboxes(c.ctx, &nodev1.ListSandboxesRequest{Limit: 3}))(t)
	if len(l.GetSandboxes()) != 3 || l.GetNext() == "" {
		t.Errorf("%v", l)
	}
	st := managertest.Must(c.GetSandboxStats(c.ctx, &nodev1.GetSandboxStatsRequest{Name: "a"}))(t)
	if st.GetOwnBytes() == 0 || st.GetDiskBytes() != 5<<20 || st.GetSharedBytes() != 1<<19 || st.GetCpu().AsDuration() != 3*time.Second || st.GetTime() == nil {
		t.Errorf("%v", st)
	}
	if all := managertest.Must(c.ListSandboxStats(c.ctx, &nodev1.ListSandboxStatsRequest{}))(t); len(all.GetStats()) != 4 {
		t.Errorf("%v", all)
	}
	if l := managertest.Must(c.ListForks(c.ctx, &nodev1.ListForksRequest{}))(t); len(l.GetForks()) != 1 {
		t.Errorf("%v", l)
	}
	if l := managertest.Must(c.ListCheckpoints(c.ctx, &nodev1.ListCheckpointsRequest{}))(t); len(l.GetCheckpoints()) != 1 {
		t.Errorf("%v", l)
	}
	managertest.Must(c.GetCheckpoint(c.ctx, &nodev1.GetCheckpointRequest{Name: "c"}))(t)
	managertest.Must(c.DeleteCheckpoint(c.ctx, &nodev1.DeleteCheckpointRequest{Name: "c"}))(t)
	managertest.Must(c.GetFork(c.ctx, &nodev1.GetForkRequest{Name: "f"}))(t)
	managertest.Must(c.DeleteFork(c.ctx, &nodev1.DeleteForkRequest{Name: "f"}))(t)
	if s := managertest.Must(c.KillSandbox(c.ctx, &nodev1.KillSandboxRequest{Name: "a"}))(t); s.GetState() != nodev1.SandboxState_SANDBOX_STATE_ENDED ||
		s.GetReason() != nodev1.EndReason_END_REASON_KILLED || s.GetEnded() == nil {
		t.Errorf("%v", s)
	}
	_, err := c.GetSandbox(c.ctx, &nodev1.GetSandboxRequest{Name: "a"})
	wantRefused(t, err, codes.NotFound, "ended", "killed")
	if n := managertest.Must(c.GetNode(c.ctx, &nodev1.GetNodeRequest{}))(t); n.GetSandboxes() != 1 || n.GetReservedBytes() == 0 {
		t.Errorf("%v", n)
	}
}

// TestNodeOnce: a retry gets the first answer; other fields under the same key
// are refused.
func TestNodeOnce(t *testing.T) {
	c := newNodeClient(t)
	c.prepare("default")
	claim := &nodev1.ClaimSandboxRequest{Pool: "pool", IdempotencyKey: "k", Metadata: map[string]string{"a": "1", "b": "2", "c": "3"}}
	s := managertest.Must(c.ClaimSandbox(c.ctx, claim))(t)
	if again := managertest.Must(c.ClaimSandbox(c.ctx, claim))(t); again.GetId() != s.GetId() {
		t.Errorf("%v and %v", s, again)
	}
	_, err := c.ClaimSandbox(c.ctx, &nodev1.ClaimSandboxRequest{Pool: "pool", IdempotencyKey: "k"})
	wantRefused(t, err, codes.FailedPrecondition, "conflict", "idempotency")
	fork := &nodev1.ForkSandboxRequest{Source: s.GetName(), Replicas: 1, IdempotencyKey: "k"}
	if a, b := managertest.Must(c.ForkSandbox(c.ctx, fork))(t), managertest.Must(c.ForkSandbox(c.ctx, fork))(t); a.GetName() != b.GetName() {
		t.Errorf("%v and %v", a, b)
	}
	write := &nodev1.CheckpointSandboxRequest{Source: s.GetName(), IdempotencyKey: "k"}
	p := managertest.Must(c.CheckpointSandbox(c.ctx, write))(t)
	if again := managertest.Must(c.CheckpointSandbox(c.ctx, write))(t); again.GetId() != p.GetId() {
		t.Errorf("%v and %v", p, again)
	}
	read := &nodev1.RestoreCheckpointRequest{Checkpoint: p.GetName(), IdempotencyKey: "k"}
	if a, b := managertest.Must(c.RestoreCheckpoint(c.ctx, read))(t), managertest.Must(c.RestoreCheckpoint(c.ctx, read))(t); a.GetId() != b.GetId() {
		t.Errorf("%v and %v", a, b)
	}
	claim.IdempotencyKey = strings.Repeat("k", 256)
	_, err = c.ClaimSandbox(c.ctx, claim)
	wantRefused(t, err, codes.InvalidArgument, "invalid", "idempotency_key")
}

// TestNodeReplayed: a repeated answer has a header that marks it, as REST's does.
func TestNodeReplayed(t *testing.T) {
	c := newNodeClient(t)
	c.prepare("default")
	managertest.Must(c.ClaimSandbox(c.ctx, &nodev1.ClaimSandboxRequest{Name: "a", Pool: "pool"}))(t)
	managertest.Must(c.CheckpointSandbox(c.ctx, &nodev1.CheckpointSandboxRequest{Source: "a", Name: "p"}))(t)
	for name, call := range map[string]func(key string, o grpc.CallOption) error{
		"claim": func(key string, o grpc.CallOption) error {
			_, err := c.ClaimSandbox(c.ctx, &nodev1.ClaimSandboxRequest{Pool: "pool", IdempotencyKey: key}, o)
			return err
		},
		"fork": func(key string, o grpc.CallOption) error {
			_, err := c.ForkSandbox(c.ctx, &nodev1.ForkSandboxRequest{Source: "a", Replicas: 1, IdempotencyKey: key}, o)
			return err
		},
		"checkpoint": func(key string, o grpc.CallOption) error {
			_, err := c.CheckpointSandbox(c.ctx, &nodev1.CheckpointSandboxRequest{Source: "a", IdempotencyKey: key}, o)
			return err
		},
		"restore": func(key string, o grpc.CallOption) error {
			_, err := c.RestoreCheckpoint(c.ctx, &nodev1.RestoreCheckpointRequest{Checkpoint: "p", IdempotencyKey: key}, o)
			return err
		},
	} {
		for i, want := range []string{"", "true", "true"} {
			var header metadata.MD
			if err := call("k", grpc.Header(&header)); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if got := strings.Join(header.Get("idempotency-replayed"), ","); got != want {
				t.Errorf("%s, request %d: idempotency-replayed is %q, not %q", name, i+1, got, want)
			}
		}
	}
}

// TestNodeWatch: the existing objects, then changes. The watch reports the
// daemon's end, and the daemon does not wait for the clients that watch.
func TestNodeWatch(t *testing.T) {
	c := newNodeClient(t)
	c.prepare("default")
	managertest.Must(c.ClaimSandbox(c.ctx, &nodev1.ClaimSandboxRequest{Name: "a", Pool: "pool"}))(t)
	w := managertest.Must(c.Watch(c.ctx, &nodev1.WatchRequest{AllNamespaces: true, Kinds: []nodev1.ObjectKind{nodev1.ObjectKind_OBJECT_KIND_SANDBOX}}))(t)
	next := func(kind nodev1.WatchEvent_Type, name string, state nodev1.SandboxState) {
		t.Helper()
		e := managertest.Must(w.Recv())(t)
		if e.GetType() != kind || e.GetSandbox().GetName() != name || e.GetSandbox().GetState() != state {
			t.Errorf("%v, not %s %s %s", e, kind, name, state)
		}
	}
	next(nodev1.WatchEvent_TYPE_OBJECT, "a", nodev1.SandboxState_SANDBOX_STATE_RUNNING)
	next(nodev1.WatchEvent_TYPE_SYNCED, "", 0)
	managertest.Must(c.PauseSandbox(c.ctx, &nodev1.PauseSandboxRequest{Name: "a"}))(t)
	next(nodev1.WatchEvent_TYPE_OBJECT, "a", nodev1.SandboxState_SANDBOX_STATE_PAUSED)
	managertest.Must(c.KillSandbox(c.ctx, &nodev1.KillSandboxRequest{Name: "a"}))(t)
	next(nodev1.WatchEvent_TYPE_DELETED, "a", nodev1.SandboxState_SANDBOX_STATE_ENDED)
	other := managertest.Must(c.Watch(c.ctx, &nodev1.WatchRequest{Namespace: "other"}))(t)
	if e := managertest.Must(other.Recv())(t); e.GetType() != nodev1.WatchEvent_TYPE_SYNCED {
		t.Errorf("another namespace has %v", e)
	}
	c.server.Shutdown(context.WithoutCancel(t.Context())) // without an end
	for {
		if _, err := w.Recv(); err != nil {
			wantRefused(t, err, codes.Unavailable, "shutting_down", "Watch again")
			break
		}
	}
	if _, err := other.Recv(); errors.Is(err, io.EOF) {
		t.Error("a watch that was cut off has ended well")
	}
}
