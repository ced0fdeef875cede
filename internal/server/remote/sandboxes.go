package remote

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/sandbox"
)

// Claim implements server.Service.
func (s *Service) Claim(ctx context.Context, r sandbox.ClaimRequest) (sandbox.Sandbox, bool, error) {
	switch {
	case r.Once != nil:
		return sandbox.Sandbox{}, false, missing("identity of requests")
	case len(r.Spec.Secrets) > 0:
		return sandbox.Sandbox{}, false, missing("secrets")
	}
	ask := nodeconv.FromClaimSpec(r.Spec)
	ask.Namespace, ask.Name = string(r.Namespace), string(r.Name)
	made, err := read(ctx, nodeconv.ToSandbox)(s.node.ClaimSandbox(ctx, ask))
	return made, false, err
}

// Sandbox implements server.Service.
func (s *Service) Sandbox(ctx context.Context, k sandbox.Key) (sandbox.Sandbox, error) {
	return read(ctx, nodeconv.ToSandbox)(s.node.GetSandbox(ctx, &nodev1.GetSandboxRequest{Namespace: string(k.Namespace), Name: string(k.Name)}))
}

// SandboxByID implements server.Service.
func (s *Service) SandboxByID(context.Context, sandbox.ID) (sandbox.Sandbox, error) {
	return sandbox.Sandbox{}, missing("sandboxes by id")
}

// Sandboxes implements server.Service.
func (s *Service) Sandboxes(ctx context.Context, r sandbox.SandboxesRequest) ([]sandbox.Sandbox, error) {
	all, err := s.all(ctx, r.Namespace)
	if err != nil {
		return nil, err
	}
	return list(ctx, r.Page, func(limit uint32, after string) ([]*nodev1.Sandbox, string, error) {
		got, err := s.node.ListSandboxes(ctx, &nodev1.ListSandboxesRequest{Namespace: string(r.Namespace), AllNamespaces: all, Limit: limit, After: after, Ended: r.Ended})
		return got.GetSandboxes(), got.GetNext(), err
	}, nodeconv.ToSandbox)
}

// Pause implements server.Service.
func (s *Service) Pause(ctx context.Context, k sandbox.Key) (sandbox.Sandbox, error) {
	return read(ctx, nodeconv.ToSandbox)(s.node.PauseSandbox(ctx, &nodev1.PauseSandboxRequest{Namespace: string(k.Namespace), Name: string(k.Name)}))
}

// Resume implements server.Service.
func (s *Service) Resume(ctx context.Context, k sandbox.Key) (sandbox.Sandbox, error) {
	return read(ctx, nodeconv.ToSandbox)(s.node.ResumeSandbox(ctx, &nodev1.ResumeSandboxRequest{Namespace: string(k.Namespace), Name: string(k.Name)}))
}

// Hibernate implements server.Service.
func (s *Service) Hibernate(ctx context.Context, k sandbox.Key) (sandbox.Sandbox, error) {
	return read(ctx, nodeconv.ToSandbox)(s.node.HibernateSandbox(ctx, &nodev1.HibernateSandboxRequest{Namespace: string(k.Namespace), Name: string(k.Name)}))
}

// Extend implements server.Service.
func (s *Service) Extend(ctx context.Context, k sandbox.Key, timeout time.Duration) (sandbox.Sandbox, error) {
	return read(ctx, nodeconv.ToSandbox)(s.node.ExtendSandbox(ctx, &nodev1.ExtendSandboxRequest{
		Namespace: string(k.Namespace), Name: string(k.Name), Timeout: durationpb.New(timeout),
	}))
}

// Kill implements server.Service.
func (s *Service) Kill(ctx context.Context, k sandbox.Key) (sandbox.Sandbox, error) {
	return read(ctx, nodeconv.ToSandbox)(s.node.KillSandbox(ctx, &nodev1.KillSandboxRequest{Namespace: string(k.Namespace), Name: string(k.Name)}))
}

// SetNetworkPolicy implements server.Service.
func (s *Service) SetNetworkPolicy(ctx context.Context, k sandbox.Key, own *policy.Policy) (sandbox.Sandbox, error) {
	ask := nodeconv.FromOwnPolicy(own)
	ask.Namespace, ask.Name = string(k.Namespace), string(k.Name)
	return read(ctx, nodeconv.ToSandbox)(s.node.SetNetworkPolicy(ctx, ask))
}

// Traffic implements server.Service.
func (s *Service) Traffic(ctx context.Context, r sandbox.TrafficRequest) (sandbox.TrafficPage, error) {
	if err := r.Validate(); err != nil { // a negative limit has no form in a message
		return sandbox.TrafficPage{}, err
	}
	return read(ctx, nodeconv.ToTraffic)(s.node.GetNetworkLog(ctx, nodeconv.FromTrafficRequest(r)))
}

// Use implements server.Service.
func (s *Service) Use(context.Context, sandbox.Key) (sandbox.Session, error) {
	return nil, missing("way into a sandbox")
}

// Cost implements server.Service.
func (s *Service) Cost(ctx context.Context, k sandbox.Key) (sandbox.Cost, error) {
	return read(ctx, nodeconv.ToCost)(s.node.GetSandboxStats(ctx, &nodev1.GetSandboxStatsRequest{Namespace: string(k.Namespace), Name: string(k.Name)}))
}

// Costs implements server.Service.
func (s *Service) Costs(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Cost, error) {
	return list(ctx, p, func(limit uint32, after string) ([]*nodev1.SandboxStats, string, error) {
		r, err := s.node.ListSandboxStats(ctx, &nodev1.ListSandboxStatsRequest{Namespace: string(n), Limit: limit, After: after})
		return r.GetStats(), r.GetNext(), err
	}, nodeconv.ToCost)
}
