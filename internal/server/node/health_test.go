package node

import (
	"testing"

	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/server"
)

// TestHealth: every known caller is told whether the daemon serves, and when
// that changes. The daemon's end is reported before the watch ends.
func TestHealth(t *testing.T) {
	var ready server.Readiness
	n := newMutualNode(t, defaultBounds, func(c *server.Config) { c.Readiness = &ready })
	watches := []healthv1.Health_WatchClient{}
	next := func(want healthv1.HealthCheckResponse_ServingStatus) {
		t.Helper()
		for _, w := range watches {
			if got := managertest.Must(w.Recv())(t).GetStatus(); got != want {
				t.Errorf("%s, not %s", got, want)
			}
		}
	}
	for _, component := range []string{"controller/c", "gateway/g", "node/n"} {
		h := healthv1.NewHealthClient(n.as(component))
		for _, service := range []string{"", "agentrun.node.v1.Node"} {
			if got := managertest.Must(h.Check(t.Context(), &healthv1.HealthCheckRequest{Service: service}))(t); got.GetStatus() != healthv1.HealthCheckResponse_NOT_SERVING {
				t.Errorf("%s of %q: %v", component, service, got)
			}
			watches = append(watches, managertest.Must(h.Watch(t.Context(), &healthv1.HealthCheckRequest{Service: service}))(t))
		}
	}
	next(healthv1.HealthCheckResponse_NOT_SERVING)
	ready.Set(true)
	next(healthv1.HealthCheckResponse_SERVING)
	h := healthv1.NewHealthClient(n.as("node/n"))
	_, err := h.Check(t.Context(), &healthv1.HealthCheckRequest{Service: "other"})
	wantRefused(t, err, codes.NotFound, "not_found", "other")
	unknown := managertest.Must(h.Watch(t.Context(), &healthv1.HealthCheckRequest{Service: "other"}))(t)
	if got := managertest.Must(unknown.Recv())(t).GetStatus(); got != healthv1.HealthCheckResponse_SERVICE_UNKNOWN {
		t.Errorf("%s", got)
	}
	all := managertest.Must(h.List(t.Context(), &healthv1.HealthListRequest{}))(t).GetStatuses()
	if len(all) != 2 || all[""].GetStatus() != healthv1.HealthCheckResponse_SERVING || all["agentrun.node.v1.Node"].GetStatus() != healthv1.HealthCheckResponse_SERVING {
		t.Errorf("%v", all)
	}
	ready.Set(false)
	n.server.Shutdown(t.Context())
	next(healthv1.HealthCheckResponse_NOT_SERVING)
	for _, w := range watches {
		_, err := w.Recv()
		wantRefused(t, err, codes.Unavailable, "shutting_down", "")
	}
}

// TestHealthOverSocket: the socket has health as well; it takes nothing that names a
// principal, which would be ignored.
func TestHealthOverSocket(t *testing.T) {
	c := newNodeClient(t)
	if got := managertest.Must(healthv1.NewHealthClient(c.conn).Check(t.Context(), &healthv1.HealthCheckRequest{}))(t); got.GetStatus() != healthv1.HealthCheckResponse_SERVING {
		t.Errorf("%v", got)
	}
	wantRefused(t, check(acting(t, "agentrun-principal", "kubernetes:a"), c.conn), codes.InvalidArgument, "invalid", "names no principal")
	wantRefused(t, check(acting(t, "agentrun-role", "viewer"), c.conn), codes.InvalidArgument, "invalid", "no principal")
}

// TestHealthWatches: the number of watches of health of a component is bounded, over
// all of its connections. Another component has its own bound, and watches that end
// make room.
func TestHealthWatches(t *testing.T) {
	n := newMutualNode(t, defaultBounds)
	watch := func(h healthv1.HealthClient) (healthv1.Health_WatchClient, error) {
		w := managertest.Must(h.Watch(t.Context(), &healthv1.HealthCheckRequest{}))(t)
		_, err := w.Recv()
		return w, err
	}
	first, second, other := n.as("node/a"), n.as("node/a"), n.as("node/b")
	for range maxHealthWatches {
		managertest.Must(watch(healthv1.NewHealthClient(first)))(t)
	}
	_, err := watch(healthv1.NewHealthClient(second))
	wantRefused(t, err, codes.ResourceExhausted, "resource_exhausted", "node:a watches")
	managertest.Must(watch(healthv1.NewHealthClient(other)))(t)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	n.Eventually(func() bool { _, err := watch(healthv1.NewHealthClient(second)); return err == nil })
}
