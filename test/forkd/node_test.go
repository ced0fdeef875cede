package forkd

import (
	"fmt"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/api/rest"
)

// TestNode: a controller uses a node over its gRPC socket, with real sandboxes.
// REST shows the objects that it makes. The controller is told of all changes,
// including the end of the daemon.
func TestNode(t *testing.T) {
	n := newNode(t)
	n.up()
	n.template(pythonImage(t))
	conn, err := grpc.NewClient("unix:"+filepath.Join(n.State, "forkd", "node.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	c, ctx := nodev1.NewNodeClient(conn), t.Context()
	w, err := c.Watch(ctx, &nodev1.WatchRequest{AllNamespaces: true, Kinds: []nodev1.ObjectKind{nodev1.ObjectKind_OBJECT_KIND_SANDBOX}})
	if err != nil {
		t.Fatal(err)
	}
	next := func(want string) {
		t.Helper()
		e, err := w.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(e.GetType(), " ", e.GetSandbox().GetName(), " ", e.GetSandbox().GetState()); got != want {
			t.Errorf("told %q, not %q", got, want)
		}
	}
	check := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	next("TYPE_SYNCED  SANDBOX_STATE_UNSPECIFIED")
	check(c.ClaimSandbox(ctx, &nodev1.ClaimSandboxRequest{Name: "a", Pool: "pool"}))
	next("TYPE_OBJECT a SANDBOX_STATE_RUNNING")
	check(n.Client.RunCode(ctx, "a", rest.CodeRequest{Code: "x = 41"}))
	check(c.CheckpointSandbox(ctx, &nodev1.CheckpointSandboxRequest{Source: "a", Name: "c"}))
	check(c.KillSandbox(ctx, &nodev1.KillSandboxRequest{Name: "a"}))
	next("TYPE_DELETED a SANDBOX_STATE_ENDED")
	check(c.RestoreCheckpoint(ctx, &nodev1.RestoreCheckpointRequest{Checkpoint: "c", Name: "b"}))
	next("TYPE_OBJECT b SANDBOX_STATE_RUNNING")
	if r, err := n.Client.RunCode(ctx, "b", rest.CodeRequest{Code: "print(x + 1)"}); err != nil || r.Stdout != "42\n" {
		t.Errorf("%+v, %v", r, err)
	}
	if st, err := c.GetSandboxStats(ctx, &nodev1.GetSandboxStatsRequest{Name: "b"}); err != nil || st.GetOwnBytes() == 0 || st.GetCpu().AsDuration() == 0 {
		t.Errorf("%v, %v", st, err)
	}
	if s, err := c.GetNode(ctx, &nodev1.GetNodeRequest{}); err != nil || s.GetSandboxes() != 1 || s.GetCheckpointBytes() == 0 || s.GetCapacityBytes() < s.GetReservedBytes() {
		t.Errorf("%v, %v", s, err)
	}
	check(c.KillSandbox(ctx, &nodev1.KillSandboxRequest{Name: "b"}))
	next("TYPE_DELETED b SANDBOX_STATE_ENDED")
	check(c.DeleteCheckpoint(ctx, &nodev1.DeleteCheckpointRequest{Name: "c"}))
	check(c.DeletePool(ctx, &nodev1.DeletePoolRequest{Name: "pool"}))
	n.down()
	if _, err := w.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("when the daemon has gone: %v", err)
	}
}
