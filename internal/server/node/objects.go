package node

import (
	"context"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// objectRequest is a request that names an object.
type objectRequest interface {
	GetNamespace() string
	GetName() string
}

// answered makes an answer from the result of a service.
func answered[T any, R any](show func(T) R) func(T, error) (R, error) {
	return func(found T, err error) (R, error) {
		if err != nil {
			var none R
			return none, err
		}
		return show(found), nil
	}
}

// of finds the object that a request names.
func of[T any](ctx context.Context, r objectRequest, get func(context.Context, sandbox.Key) (T, error)) (T, error) {
	k, err := sandbox.ParseKey(r.GetNamespace(), r.GetName())
	if err != nil {
		var none T
		return none, err
	}
	return get(ctx, k)
}

// conditionalRequest is a request for an object, which must meet a precondition.
type conditionalRequest interface {
	objectRequest
	GetPrecondition() *nodev1.Precondition
}

// meant is of, for a call with a precondition.
func meant[T any](ctx context.Context, r conditionalRequest, do func(context.Context, sandbox.Key, ...sandbox.Precondition) (T, error)) (T, error) {
	return of(ctx, r, func(ctx context.Context, k sandbox.Key) (T, error) {
		when, err := nodeconv.ToPrecondition(r.GetPrecondition())
		if err != nil {
			var none T
			return none, err
		}
		return do(ctx, k, when)
	})
}

// deleted deletes the object that a request names.
func deleted(ctx context.Context, r conditionalRequest, del func(context.Context, sandbox.Key, ...sandbox.Precondition) error) (*emptypb.Empty, error) {
	return meant(ctx, r, func(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (*emptypb.Empty, error) {
		return &emptypb.Empty{}, del(ctx, k, when...)
	})
}

// ownedRequest is a request that may give an owner.
type ownedRequest interface {
	objectRequest
	GetOwner() string
}

// applied applies the settings in a request, for the owner that it gives, if
// any.
func applied[T any](ctx context.Context, r ownedRequest, apply func(sandbox.Key, sandbox.UID) (T, error)) (T, error) {
	return of(ctx, r, func(_ context.Context, k sandbox.Key) (out T, err error) {
		var owner sandbox.UID
		if given := r.GetOwner(); given != "" {
			if owner, err = sandbox.ParseUID(given); err != nil {
				return out, err
			}
		}
		return apply(k, owner)
	})
}

// listRequest is a request for a page.
type listRequest interface {
	GetNamespace() string
	GetLimit() uint32
	GetAfter() string
}

// pageOf finds the page that a request asks for. v is the state of the node's objects before
// that. If the page is of all namespaces, it goes on after a namespace and a position in it.
func pageOf[T any, R proto.Message](ctx context.Context, n *nodeAPI, r listRequest,
	find func(context.Context, sandbox.Namespace, sandbox.Page) ([]T, error), position func(T) (sandbox.Namespace, string), show func(context.Context, T) (R, error),
) (v sandbox.StateVersion, items []R, next string, err error) {
	var ns sandbox.Namespace
	of := func(one T) string { _, at := position(one); return at }
	if all, ok := r.(interface{ GetAllNamespaces() bool }); ok && all.GetAllNamespaces() {
		if r.GetNamespace() != "" {
			return v, nil, "", sandbox.Invalid("namespace", "there is one, and all_namespaces is set")
		}
		of = func(one T) string { in, at := position(one); return string(in) + "/" + at }
	} else if ns, err = sandbox.ParseNamespace(r.GetNamespace()); err != nil {
		return v, nil, "", err
	}
	var limit *int
	if given := r.GetLimit(); given > 0 {
		limit = new(int(given))
	}
	p, err := server.Page(limit, r.GetAfter())
	if err != nil {
		return v, nil, "", err
	}
	if v, err = n.Service.Version(ctx); err != nil {
		return v, nil, "", err
	}
	items, next, err = server.List(ctx, ns, p, find, of, show, func(one R) int { return proto.Size(one) })
	return v, items, next, err
}

// nodeTemplate adds the state of the builds to a template.
func (n *nodeAPI) nodeTemplate(ctx context.Context, t sandbox.Template) (*nodev1.Template, error) {
	builds, err := n.Service.Builds(ctx, t)
	if err != nil {
		return nil, err
	}
	return nodeconv.FromTemplate(t, builds), nil
}

// ApplyTemplate implements nodev1.NodeServer.
func (n *nodeAPI) ApplyTemplate(ctx context.Context, r *nodev1.ApplyTemplateRequest) (*nodev1.Template, error) {
	return applied(ctx, r, func(k sandbox.Key, owner sandbox.UID) (*nodev1.Template, error) {
		spec, err := nodeconv.ToTemplateSpec(r.GetSpec())
		if err != nil {
			return nil, err
		}
		t, err := n.Service.ApplyTemplate(ctx, k, spec, owner)
		if err != nil {
			return nil, err
		}
		return n.nodeTemplate(ctx, t)
	})
}

// GetTemplate implements nodev1.NodeServer.
func (n *nodeAPI) GetTemplate(ctx context.Context, r *nodev1.GetTemplateRequest) (*nodev1.Template, error) {
	t, err := of(ctx, r, n.Service.Template)
	if err != nil {
		return nil, err
	}
	return n.nodeTemplate(ctx, t)
}

// ListTemplates implements nodev1.NodeServer.
func (n *nodeAPI) ListTemplates(ctx context.Context, r *nodev1.ListTemplatesRequest) (*nodev1.ListTemplatesResponse, error) {
	v, items, next, err := pageOf(ctx, n, r, n.Service.Templates, func(t sandbox.Template) (sandbox.Namespace, string) { return t.Namespace, string(t.Name) }, n.nodeTemplate)
	return &nodev1.ListTemplatesResponse{Templates: items, Next: next, ResourceVersion: v.Version, StateId: v.ID}, err
}

// DeleteTemplate implements nodev1.NodeServer.
func (n *nodeAPI) DeleteTemplate(ctx context.Context, r *nodev1.DeleteTemplateRequest) (*emptypb.Empty, error) {
	return deleted(ctx, r, n.Service.DeleteTemplate)
}

func (n *nodeAPI) nodePool(ctx context.Context, k sandbox.Key) (*nodev1.Pool, error) {
	p, st, err := n.Service.Pool(ctx, k)
	if err != nil {
		return nil, err
	}
	return nodeconv.FromPool(p, st), nil
}

// ApplyPool implements nodev1.NodeServer.
func (n *nodeAPI) ApplyPool(ctx context.Context, r *nodev1.ApplyPoolRequest) (*nodev1.Pool, error) {
	return applied(ctx, r, func(k sandbox.Key, owner sandbox.UID) (*nodev1.Pool, error) {
		spec, err := nodeconv.ToPoolSpec(r.GetSpec())
		if err != nil {
			return nil, err
		}
		if _, err := n.Service.ApplyPool(ctx, k, spec, owner); err != nil {
			return nil, err
		}
		return n.nodePool(ctx, k)
	})
}

// GetPool implements nodev1.NodeServer.
func (n *nodeAPI) GetPool(ctx context.Context, r *nodev1.GetPoolRequest) (*nodev1.Pool, error) {
	return of(ctx, r, n.nodePool)
}

// ListPools implements nodev1.NodeServer.
func (n *nodeAPI) ListPools(ctx context.Context, r *nodev1.ListPoolsRequest) (*nodev1.ListPoolsResponse, error) {
	v, items, next, err := pageOf(ctx, n, r, n.Service.Pools, func(p sandbox.Pool) (sandbox.Namespace, string) { return p.Namespace, string(p.Name) },
		func(ctx context.Context, p sandbox.Pool) (*nodev1.Pool, error) { return n.nodePool(ctx, p.Key) })
	return &nodev1.ListPoolsResponse{Pools: items, Next: next, ResourceVersion: v.Version, StateId: v.ID}, err
}

// DeletePool implements nodev1.NodeServer.
func (n *nodeAPI) DeletePool(ctx context.Context, r *nodev1.DeletePoolRequest) (*emptypb.Empty, error) {
	return deleted(ctx, r, n.Service.DeletePool)
}

// GetFork implements nodev1.NodeServer.
func (n *nodeAPI) GetFork(ctx context.Context, r *nodev1.GetForkRequest) (*nodev1.Fork, error) {
	return answered(nodeconv.FromFork)(of(ctx, r, n.Service.ForkOf))
}

// ListForks implements nodev1.NodeServer.
func (n *nodeAPI) ListForks(ctx context.Context, r *nodev1.ListForksRequest) (*nodev1.ListForksResponse, error) {
	v, items, next, err := pageOf(ctx, n, r, n.Service.Forks, func(f sandbox.Fork) (sandbox.Namespace, string) { return f.Namespace, string(f.Name) }, server.Plain(nodeconv.FromFork))
	return &nodev1.ListForksResponse{Forks: items, Next: next, ResourceVersion: v.Version, StateId: v.ID}, err
}

// DeleteFork implements nodev1.NodeServer.
func (n *nodeAPI) DeleteFork(ctx context.Context, r *nodev1.DeleteForkRequest) (*emptypb.Empty, error) {
	return deleted(ctx, r, n.Service.DeleteFork)
}

// GetCheckpoint implements nodev1.NodeServer.
func (n *nodeAPI) GetCheckpoint(ctx context.Context, r *nodev1.GetCheckpointRequest) (*nodev1.Checkpoint, error) {
	return answered(nodeconv.FromCheckpoint)(of(ctx, r, n.Service.CheckpointOf))
}

// ListCheckpoints implements nodev1.NodeServer.
func (n *nodeAPI) ListCheckpoints(ctx context.Context, r *nodev1.ListCheckpointsRequest) (*nodev1.ListCheckpointsResponse, error) {
	v, items, next, err := pageOf(ctx, n, r, n.Service.Checkpoints, func(c sandbox.CheckpointSize) (sandbox.Namespace, string) { return c.Namespace, string(c.Name) }, server.Plain(nodeconv.FromCheckpoint))
	return &nodev1.ListCheckpointsResponse{Checkpoints: items, Next: next, ResourceVersion: v.Version, StateId: v.ID}, err
}

// DeleteCheckpoint implements nodev1.NodeServer.
func (n *nodeAPI) DeleteCheckpoint(ctx context.Context, r *nodev1.DeleteCheckpointRequest) (*emptypb.Empty, error) {
	return deleted(ctx, r, n.Service.DeleteCheckpoint)
}
