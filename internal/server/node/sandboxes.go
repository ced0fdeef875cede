package node

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// onceRequest is a request that a client may repeat.
type onceRequest interface {
	proto.Message
	GetIdempotencyKey() string
	GetIdentity() *nodev1.RequestIdentity
}

// once returns the identity of a request that has an idempotency key, and nil for a
// request without one. It is the identity that the caller has found, or else that of
// all fields except the values of secrets.
func once(ctx context.Context, method string, r onceRequest) (*sandbox.Once, error) {
	given := r.GetIdempotencyKey()
	if found, err := nodeconv.ToOnce(r.GetIdentity()); found != nil {
		if err == nil && given != "" {
			err = sandbox.Invalid("identity", "the request has an idempotency key, too: leave one of them out")
		}
		o := found.Of(server.PrincipalOf(ctx).Name, method)
		return &o, err
	}
	if given == "" {
		return nil, nil
	}
	if len(given) > server.MaxIdempotencyKey {
		return nil, sandbox.Invalid("idempotency_key", "it has 1 to %d characters", server.MaxIdempotencyKey)
	}
	body, err := proto.MarshalOptions{Deterministic: true}.Marshal(withoutValues(r))
	if err != nil {
		return nil, err
	}
	who := server.PrincipalOf(ctx)
	o := sandbox.NewOnce(who.Name, method, given, body)
	return &o, nil
}

// withoutValues returns a request without the values of secrets: the identity of a request is
// kept on disk as a digest, from which short values could be guessed.
func withoutValues(r proto.Message) proto.Message {
	claim, ok := r.(*nodev1.ClaimSandboxRequest)
	if !ok || len(claim.GetSecretValues()) == 0 {
		return r
	}
	claim = proto.CloneOf(claim)
	for name := range claim.GetSecretValues() {
		claim.SecretValues[name] = nil
	}
	return claim
}

// replayedHeader marks an answer that was given before, as REST's Idempotency-Replayed
// does. It is not a field, because it describes the answer and not the object.
const replayedHeader = "idempotency-replayed"

// answeredOnce is answered, for requests that may have been done before.
func answeredOnce[T, G any](ctx context.Context, from func(T) G) func(T, bool, error) (G, error) {
	return func(v T, replayed bool, err error) (G, error) {
		if err == nil && replayed {
			err = grpc.SetHeader(ctx, metadata.Pairs(replayedHeader, "true"))
		}
		return answered(from)(v, err)
	}
}

// makingRequest is a request that makes an object from another one.
type makingRequest interface {
	onceRequest
	GetNamespace() string
	GetName() string
}

// making has the common parts of such requests: the object that they start from, the
// key of the new object, and the identity of the request.
type making struct {
	from, key sandbox.Key
	once      *sandbox.Once
}

// makingOf parses these parts; from is the name of the object that the request
// starts from.
func makingOf(ctx context.Context, method string, r makingRequest, from string) (m making, err error) {
	if m.from, err = sandbox.ParseKey(r.GetNamespace(), from); err != nil {
		return m, err
	}
	if m.key, err = server.Named(m.from, r.GetName()); err != nil {
		return m, err
	}
	m.once, err = once(ctx, method, r)
	return m, err
}

// ClaimSandbox implements nodev1.NodeServer.
func (n *nodeAPI) ClaimSandbox(ctx context.Context, r *nodev1.ClaimSandboxRequest) (*nodev1.Sandbox, error) {
	m, err := makingOf(ctx, nodev1.Node_ClaimSandbox_FullMethodName, r, r.GetPool())
	if err != nil {
		return nil, err
	}
	claim, err := nodeconv.ToClaim(r)
	if err != nil {
		return nil, err
	}
	if claim.Owner != "" && r.GetName() == "" { // each call would make up a new name
		return nil, sandbox.Invalid("name", "a claim for an owner must give one")
	}
	claim.Key, claim.Once = m.key, m.once
	return answeredOnce(ctx, func(s sandbox.Sandbox) *nodev1.Sandbox {
		out := nodeconv.FromSandbox(s)
		out.Endpoint = n.Endpoint
		return out
	})(n.Service.Claim(ctx, claim))
}

// GetSandbox implements nodev1.NodeServer.
func (n *nodeAPI) GetSandbox(ctx context.Context, r *nodev1.GetSandboxRequest) (*nodev1.Sandbox, error) {
	return answered(nodeconv.FromSandbox)(of(ctx, r, n.Sandbox))
}

// ListSandboxes implements nodev1.NodeServer.
func (n *nodeAPI) ListSandboxes(ctx context.Context, r *nodev1.ListSandboxesRequest) (*nodev1.ListSandboxesResponse, error) {
	v, items, next, err := pageOf(ctx, n, r,
		func(ctx context.Context, ns sandbox.Namespace, p sandbox.Page) ([]sandbox.Sandbox, error) {
			return n.Service.Sandboxes(ctx, sandbox.SandboxesRequest{Namespace: ns, Page: p, Ended: r.GetEnded()})
		}, func(s sandbox.Sandbox) (sandbox.Namespace, string) { return s.Namespace, s.Position() }, server.Plain(nodeconv.FromSandbox))
	return &nodev1.ListSandboxesResponse{Sandboxes: items, Next: next, ResourceVersion: v.Version, StateId: v.ID}, err
}

// verb changes the state of a sandbox.
func verb(ctx context.Context, r conditionalRequest, do func(context.Context, sandbox.Key, ...sandbox.Precondition) (sandbox.Sandbox, error)) (*nodev1.Sandbox, error) {
	return answered(nodeconv.FromSandbox)(meant(ctx, r, do))
}

// PauseSandbox implements nodev1.NodeServer.
func (n *nodeAPI) PauseSandbox(ctx context.Context, r *nodev1.PauseSandboxRequest) (*nodev1.Sandbox, error) {
	return verb(ctx, r, n.Service.Pause)
}

// ResumeSandbox implements nodev1.NodeServer.
func (n *nodeAPI) ResumeSandbox(ctx context.Context, r *nodev1.ResumeSandboxRequest) (*nodev1.Sandbox, error) {
	return verb(ctx, r, n.Service.Resume)
}

// HibernateSandbox implements nodev1.NodeServer.
func (n *nodeAPI) HibernateSandbox(ctx context.Context, r *nodev1.HibernateSandboxRequest) (*nodev1.Sandbox, error) {
	return verb(ctx, r, n.Service.Hibernate)
}

// ExtendSandbox implements nodev1.NodeServer.
func (n *nodeAPI) ExtendSandbox(ctx context.Context, r *nodev1.ExtendSandboxRequest) (*nodev1.Sandbox, error) {
	if (r.GetTimeout() == nil) == (r.GetExpires() == nil) {
		return nil, sandbox.Invalid("timeout", "either it or expires must be there; a timeout of zero is none")
	}
	timeout, err := nodeconv.ToDuration("timeout", r.GetTimeout())
	if err != nil {
		return nil, err
	}
	at, err := nodeconv.ToExpiry("expires", r.GetExpires())
	if err != nil {
		return nil, err
	}
	return verb(ctx, r, func(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
		if r.GetExpires() != nil {
			return n.Service.SetExpiry(ctx, k, at, when...)
		}
		return n.Service.Extend(ctx, k, timeout, when...)
	})
}

// KillSandbox implements nodev1.NodeServer.
func (n *nodeAPI) KillSandbox(ctx context.Context, r *nodev1.KillSandboxRequest) (*nodev1.Sandbox, error) {
	return verb(ctx, r, n.Service.Kill)
}

// SetSandboxToken implements nodev1.NodeServer.
func (n *nodeAPI) SetSandboxToken(ctx context.Context, r *nodev1.SetSandboxTokenRequest) (*nodev1.Sandbox, error) {
	token, err := sandbox.ParseTokenHash(r.GetTokenSha256())
	if err != nil {
		return nil, err
	}
	return verb(ctx, r, func(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
		return n.Service.SetToken(ctx, k, token, when...)
	})
}

// ReleaseOwner implements nodev1.NodeServer.
func (n *nodeAPI) ReleaseOwner(ctx context.Context, r *nodev1.ReleaseOwnerRequest) (*emptypb.Empty, error) {
	in, err := sandbox.ParseNamespace(r.GetNamespace())
	if err != nil {
		return nil, err
	}
	owner, err := sandbox.ParseUID(r.GetOwner())
	if err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, n.Service.ReleaseOwner(ctx, sandbox.ReleaseRequest{Namespace: in, Owner: owner})
}

// GetSandboxStats implements nodev1.NodeServer.
func (n *nodeAPI) GetSandboxStats(ctx context.Context, r *nodev1.GetSandboxStatsRequest) (*nodev1.SandboxStats, error) {
	return answered(nodeconv.FromCost)(of(ctx, r, n.Service.Cost))
}

// ListSandboxStats implements nodev1.NodeServer.
func (n *nodeAPI) ListSandboxStats(ctx context.Context, r *nodev1.ListSandboxStatsRequest) (*nodev1.ListSandboxStatsResponse, error) {
	_, items, next, err := pageOf(ctx, n, r, n.Service.Costs,
		func(c sandbox.Cost) (sandbox.Namespace, string) { return c.Namespace, c.Position() }, server.Plain(nodeconv.FromCost))
	return &nodev1.ListSandboxStatsResponse{Stats: items, Next: next}, err
}

// ForkSandbox implements nodev1.NodeServer.
func (n *nodeAPI) ForkSandbox(ctx context.Context, r *nodev1.ForkSandboxRequest) (*nodev1.Fork, error) {
	m, err := makingOf(ctx, nodev1.Node_ForkSandbox_FullMethodName, r, r.GetSource())
	if err != nil {
		return nil, err
	}
	spec, err := nodeconv.ToForkSpec(r)
	if err != nil {
		return nil, err
	}
	if spec.Owned() && r.GetName() == "" { // each call would make up a new name
		return nil, sandbox.Invalid("name", "a fork for owners must give one")
	}
	when, err := nodeconv.ToPrecondition(r.GetPrecondition())
	if err != nil {
		return nil, err
	}
	return answeredOnce(ctx, nodeconv.FromFork)(n.Service.Fork(ctx, sandbox.ForkRequest{Key: m.key, Spec: spec, Once: m.once, When: when}))
}

// CheckpointSandbox implements nodev1.NodeServer.
func (n *nodeAPI) CheckpointSandbox(ctx context.Context, r *nodev1.CheckpointSandboxRequest) (*nodev1.Checkpoint, error) {
	m, err := makingOf(ctx, nodev1.Node_CheckpointSandbox_FullMethodName, r, r.GetSource())
	if err != nil {
		return nil, err
	}
	when, err := nodeconv.ToPrecondition(r.GetPrecondition())
	if err != nil {
		return nil, err
	}
	return answeredOnce(ctx, nodeconv.FromCheckpoint)(n.Service.Checkpoint(ctx, sandbox.CheckpointRequest{Key: m.key, Source: m.from.Name, Once: m.once, When: when}))
}

// RestoreCheckpoint implements nodev1.NodeServer.
func (n *nodeAPI) RestoreCheckpoint(ctx context.Context, r *nodev1.RestoreCheckpointRequest) (*nodev1.Sandbox, error) {
	m, err := makingOf(ctx, nodev1.Node_RestoreCheckpoint_FullMethodName, r, r.GetCheckpoint())
	if err != nil {
		return nil, err
	}
	spec, err := nodeconv.ToRestoreSpec(r)
	if err != nil {
		return nil, err
	}
	return answeredOnce(ctx, nodeconv.FromSandbox)(n.Service.Restore(ctx, sandbox.RestoreRequest{Key: m.key, Checkpoint: m.from.Name, Spec: spec, Once: m.once}))
}
