package remote

import (
	"cmp"
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/sandbox"
)

// Claim implements server.Service.
func (s *Service) Claim(ctx context.Context, r sandbox.ClaimRequest) (sandbox.Sandbox, bool, error) {
	identity, err := s.identity(ctx, r.Once)
	if err != nil {
		return sandbox.Sandbox{}, false, err
	}
	if err := s.needsIf(ctx, len(r.Spec.Secrets) > 0, "secrets"); err != nil {
		return sandbox.Sandbox{}, false, err
	}
	if err := s.needsIf(ctx, r.Owner != "" || r.Token != "" || len(r.Values) > 0, "owners"); err != nil {
		return sandbox.Sandbox{}, false, err
	}
	if err := s.needsIf(ctx, !r.Spec.Expires.IsZero(), "expires"); err != nil {
		return sandbox.Sandbox{}, false, err
	}
	ask := nodeconv.FromClaim(r)
	ask.Identity = identity
	var header metadata.MD
	made, err := read(ctx, nodeconv.ToSandbox)(s.node.ClaimSandbox(ctx, ask, grpc.Header(&header)))
	return made, replayed(header), err
}

// replayed reports whether an answer is marked as one that was given before.
func replayed(header metadata.MD) bool { return len(header.Get("idempotency-replayed")) > 0 }

// Sandbox implements server.Service.
func (s *Service) Sandbox(ctx context.Context, k sandbox.Key) (sandbox.Sandbox, error) {
	return read(ctx, nodeconv.ToSandbox)(s.node.GetSandbox(ctx, &nodev1.GetSandboxRequest{Namespace: string(k.Namespace), Name: string(k.Name)}))
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
func (s *Service) Pause(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
	p, err := s.precondition(ctx, when)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return read(ctx, nodeconv.ToSandbox)(s.node.PauseSandbox(ctx, &nodev1.PauseSandboxRequest{Namespace: string(k.Namespace), Name: string(k.Name), Precondition: p}))
}

// Resume implements server.Service.
func (s *Service) Resume(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
	p, err := s.precondition(ctx, when)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return read(ctx, nodeconv.ToSandbox)(s.node.ResumeSandbox(ctx, &nodev1.ResumeSandboxRequest{Namespace: string(k.Namespace), Name: string(k.Name), Precondition: p}))
}

// Hibernate implements server.Service.
func (s *Service) Hibernate(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
	p, err := s.precondition(ctx, when)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return read(ctx, nodeconv.ToSandbox)(s.node.HibernateSandbox(ctx, &nodev1.HibernateSandboxRequest{Namespace: string(k.Namespace), Name: string(k.Name), Precondition: p}))
}

// Extend implements server.Service.
func (s *Service) Extend(ctx context.Context, k sandbox.Key, timeout time.Duration, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
	return s.extend(ctx, k, &nodev1.ExtendSandboxRequest{Timeout: durationpb.New(timeout)}, when)
}

// SetExpiry implements server.Service.
func (s *Service) SetExpiry(ctx context.Context, k sandbox.Key, at time.Time, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
	if err := s.needs(ctx, "expires"); err != nil {
		return sandbox.Sandbox{}, err
	}
	return s.extend(ctx, k, &nodev1.ExtendSandboxRequest{Expires: timestamppb.New(at)}, when)
}

func (s *Service) extend(ctx context.Context, k sandbox.Key, ask *nodev1.ExtendSandboxRequest, when []sandbox.Precondition) (_ sandbox.Sandbox, err error) {
	if ask.Precondition, err = s.precondition(ctx, when); err != nil {
		return sandbox.Sandbox{}, err
	}
	ask.Namespace, ask.Name = string(k.Namespace), string(k.Name)
	return read(ctx, nodeconv.ToSandbox)(s.node.ExtendSandbox(ctx, ask))
}

// SetToken implements server.Service.
func (s *Service) SetToken(ctx context.Context, k sandbox.Key, token sandbox.TokenHash, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
	p, err := s.precondition(ctx, when)
	if err == nil {
		err = s.needs(ctx, "owners")
	}
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return read(ctx, nodeconv.ToSandbox)(s.node.SetSandboxToken(ctx, &nodev1.SetSandboxTokenRequest{
		Namespace: string(k.Namespace), Name: string(k.Name), TokenSha256: string(token), Precondition: p,
	}))
}

// ReleaseOwner implements server.Service.
func (s *Service) ReleaseOwner(ctx context.Context, r sandbox.ReleaseRequest) error {
	if err := s.needs(ctx, "owners"); err != nil {
		return err
	}
	return done(ctx)(s.node.ReleaseOwner(ctx, &nodev1.ReleaseOwnerRequest{Namespace: string(r.Namespace), Owner: string(r.Owner)}))
}

// precondition combines all preconditions into one.
func (s *Service) precondition(ctx context.Context, when []sandbox.Precondition) (*nodev1.Precondition, error) {
	var all sandbox.Precondition
	for _, p := range when {
		both := sandbox.Precondition{ID: cmp.Or(p.ID, all.ID), Owner: cmp.Or(p.Owner, all.Owner), Version: cmp.Or(p.Version, all.Version)}
		if overlaid := (sandbox.Precondition{ID: cmp.Or(all.ID, p.ID), Owner: cmp.Or(all.Owner, p.Owner), Version: cmp.Or(all.Version, p.Version)}); both != overlaid {
			return nil, sandbox.Errorf(sandbox.CodeConflict, "the preconditions contradict each other")
		}
		all = both
	}
	return nodeconv.FromPrecondition(all), s.needsIf(ctx, all != sandbox.Precondition{}, "preconditions")
}

// Kill implements server.Service.
func (s *Service) Kill(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
	p, err := s.precondition(ctx, when)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return read(ctx, nodeconv.ToSandbox)(s.node.KillSandbox(ctx, &nodev1.KillSandboxRequest{Namespace: string(k.Namespace), Name: string(k.Name), Precondition: p}))
}

// SetNetworkPolicy implements server.Service.
func (s *Service) SetNetworkPolicy(ctx context.Context, k sandbox.Key, own *policy.Policy, when ...sandbox.Precondition) (_ sandbox.Sandbox, err error) {
	ask := nodeconv.FromOwnPolicy(own)
	if ask.Precondition, err = s.precondition(ctx, when); err != nil {
		return sandbox.Sandbox{}, err
	}
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
