package node

import (
	"cmp"
	"context"
	"sync"

	"google.golang.org/grpc"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// maxHealthWatches is how many watches of health a component, or a user of the socket, may
// have.
const maxHealthWatches = 64

// health implements grpc.health.v1 with the daemon's readiness.
type health struct {
	healthv1.UnimplementedHealthServer
	*nodeAPI

	mu      sync.Mutex     // protects watches
	watches map[string]int // how many each component or user has
}

// status returns the status of a service; the empty name stands for the whole
// server.
func (h *health) status(service string) (now healthv1.HealthCheckResponse_ServingStatus, changed <-chan struct{}) {
	ready, changed := h.Readiness.Now()
	switch {
	case service != "" && service != nodev1.Node_ServiceDesc.ServiceName:
		return healthv1.HealthCheckResponse_SERVICE_UNKNOWN, changed
	case ready:
		return healthv1.HealthCheckResponse_SERVING, changed
	}
	return healthv1.HealthCheckResponse_NOT_SERVING, changed
}

// Check implements healthv1.HealthServer.
func (h *health) Check(_ context.Context, r *healthv1.HealthCheckRequest) (*healthv1.HealthCheckResponse, error) {
	now, _ := h.status(r.GetService())
	if now == healthv1.HealthCheckResponse_SERVICE_UNKNOWN {
		return nil, sandbox.Errorf(sandbox.CodeNotFound, "there is no service %s", sandbox.Quote(r.GetService())).
			Try("Leave the service out, or ask for %s", nodev1.Node_ServiceDesc.ServiceName)
	}
	return &healthv1.HealthCheckResponse{Status: now}, nil
}

// List implements healthv1.HealthServer.
func (h *health) List(context.Context, *healthv1.HealthListRequest) (*healthv1.HealthListResponse, error) {
	now, _ := h.status("")
	all := map[string]*healthv1.HealthCheckResponse{}
	for _, service := range []string{"", nodev1.Node_ServiceDesc.ServiceName} {
		all[service] = &healthv1.HealthCheckResponse{Status: now}
	}
	return &healthv1.HealthListResponse{Statuses: all}, nil
}

// Watch implements healthv1.HealthServer. Before its end, the server reports
// that the daemon does not serve.
func (h *health) Watch(r *healthv1.HealthCheckRequest, out grpc.ServerStreamingServer[healthv1.HealthCheckResponse]) error {
	return h.serve(out.Context(), healthv1.Health_Watch_FullMethodName, r, func(ctx context.Context) error {
		p := server.PrincipalOf(ctx)
		end, err := h.beginWatch(cmp.Or(p.Via.String(), p.Name))
		if err != nil {
			return err
		}
		defer end()
		last := healthv1.HealthCheckResponse_UNKNOWN
		for ended := false; ; {
			now, changed := h.status(r.GetService())
			if now != last {
				if err := out.Send(&healthv1.HealthCheckResponse{Status: now}); err != nil {
					return err
				}
				last = now
			}
			if ended {
				return sandbox.Errorf(sandbox.CodeClosing, "the daemon is shutting down").Try("Watch again when it is back")
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return ctx.Err()
			case <-h.serving.Done():
				ended = true
			}
		}
	})
}

// beginWatch counts a watch, within the bound for one caller.
func (h *health) beginWatch(who string) (end func(), err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.watches[who] >= maxHealthWatches {
		return nil, sandbox.Errorf(server.CodeExhausted, "%s watches the health %d times already", who, maxHealthWatches).
			Try("End a watch before another one")
	}
	h.watches[who]++
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.watches[who]--; h.watches[who] == 0 {
			delete(h.watches, who)
		}
	}, nil
}
