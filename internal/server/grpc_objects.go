package server

import (
	"context"

	"google.golang.org/protobuf/types/known/emptypb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/sandbox"
)

// objectRequest is a request that names an object.
type objectRequest interface {
	GetNamespace() string
	GetName() string
}

// answered makes an answer of what a service gave.
func answered[T any, R any](show func(T) R) func(T, error) (R, error) {
	return func(found T, err error) (R, error) {
		if err != nil {
			var none R
			return none, err
		}
		return show(found), nil
	}
}

// of finds what a request names.
func of[T any](r objectRequest, get func(sandbox.Key) (T, error)) (T, error) {
	k, err := key(r.GetNamespace(), r.GetName())
	if err != nil {
		var none T
		return none, err
	}
	return get(k)
}

// deleted deletes what a request names.
func deleted(r objectRequest, del func(sandbox.Key) error) (*emptypb.Empty, error) {
	return of(r, func(k sandbox.Key) (*emptypb.Empty, error) { return &emptypb.Empty{}, del(k) })
}

// listRequest is a request for a page.
type listRequest interface {
	GetNamespace() string
	GetLimit() uint32
	GetAfter() string
}

// pageOf finds the page that a request asks for.
func pageOf[T, R any](r listRequest, find func(sandbox.Namespace, sandbox.Page) ([]T, error), position func(T) string, show func(T) (R, error)) (items []R, next string, err error) {
	ns, err := sandbox.ParseNamespace(r.GetNamespace())
	if err != nil {
		return nil, "", err
	}
	limit := defaultPage
	if given := r.GetLimit(); given > 0 {
		limit = int(given)
	}
	p, err := page(&limit, r.GetAfter())
	if err != nil {
		return nil, "", err
	}
	found, err := find(ns, p)
	if err != nil {
		return nil, "", err
	}
	found, next = cut(found, p, position)
	for _, one := range found {
		shown, err := show(one)
		if sandbox.HasCode(err, sandbox.CodeNotFound) {
			continue // it was deleted meanwhile
		}
		if err != nil {
			return nil, "", err
		}
		items = append(items, shown)
	}
	return items, next, nil
}

// plain is show for what is shown without asking further.
func plain[T, R any](show func(T) R) func(T) (R, error) {
	return func(v T) (R, error) { return show(v), nil }
}

// GetNode implements nodev1.NodeServer.
func (n *nodeAPI) GetNode(context.Context, *nodev1.GetNodeRequest) (*nodev1.NodeStatus, error) {
	return answered(func(s sandbox.NodeStatus) *nodev1.NodeStatus {
		out := nodeconv.FromNode(s)
		out.Version, out.Endpoint = n.Version, n.Endpoint
		return out
	})(n.Service.Node())
}

// nodeTemplate adds to a template how far it is.
func (n *nodeAPI) nodeTemplate(t sandbox.Template) (*nodev1.Template, error) {
	builds, err := n.Service.Builds(t)
	if err != nil {
		return nil, err
	}
	return nodeconv.FromTemplate(t, builds), nil
}

// ApplyTemplate implements nodev1.NodeServer.
func (n *nodeAPI) ApplyTemplate(_ context.Context, r *nodev1.ApplyTemplateRequest) (*nodev1.Template, error) {
	return of(r, func(k sandbox.Key) (*nodev1.Template, error) {
		spec, err := nodeconv.ToTemplateSpec(r.GetSpec())
		if err != nil {
			return nil, err
		}
		t, err := n.Service.ApplyTemplate(k, spec)
		if err != nil {
			return nil, err
		}
		return n.nodeTemplate(t)
	})
}

// GetTemplate implements nodev1.NodeServer.
func (n *nodeAPI) GetTemplate(_ context.Context, r *nodev1.GetTemplateRequest) (*nodev1.Template, error) {
	t, err := of(r, n.Service.Template)
	if err != nil {
		return nil, err
	}
	return n.nodeTemplate(t)
}

// ListTemplates implements nodev1.NodeServer.
func (n *nodeAPI) ListTemplates(_ context.Context, r *nodev1.ListTemplatesRequest) (*nodev1.ListTemplatesResponse, error) {
	items, next, err := pageOf(r, n.Service.Templates, func(t sandbox.Template) string { return string(t.Name) }, n.nodeTemplate)
	return &nodev1.ListTemplatesResponse{Templates: items, Next: next}, err
}

// DeleteTemplate implements nodev1.NodeServer.
func (n *nodeAPI) DeleteTemplate(_ context.Context, r *nodev1.DeleteTemplateRequest) (*emptypb.Empty, error) {
	return deleted(r, n.Service.DeleteTemplate)
}

func (n *nodeAPI) nodePool(k sandbox.Key) (*nodev1.Pool, error) {
	p, st, err := n.Service.Pool(k)
	if err != nil {
		return nil, err
	}
	return nodeconv.FromPool(p, st), nil
}

// ApplyPool implements nodev1.NodeServer.
func (n *nodeAPI) ApplyPool(_ context.Context, r *nodev1.ApplyPoolRequest) (*nodev1.Pool, error) {
	return of(r, func(k sandbox.Key) (*nodev1.Pool, error) {
		spec, err := nodeconv.ToPoolSpec(r.GetSpec())
		if err != nil {
			return nil, err
		}
		if _, err := n.Service.ApplyPool(k, spec); err != nil {
			return nil, err
		}
		return n.nodePool(k)
	})
}

// GetPool implements nodev1.NodeServer.
func (n *nodeAPI) GetPool(_ context.Context, r *nodev1.GetPoolRequest) (*nodev1.Pool, error) {
	return of(r, n.nodePool)
}

// ListPools implements nodev1.NodeServer.
func (n *nodeAPI) ListPools(_ context.Context, r *nodev1.ListPoolsRequest) (*nodev1.ListPoolsResponse, error) {
	items, next, err := pageOf(r, n.Service.Pools, func(p sandbox.Pool) string { return string(p.Name) },
		func(p sandbox.Pool) (*nodev1.Pool, error) { return n.nodePool(p.Key) })
	return &nodev1.ListPoolsResponse{Pools: items, Next: next}, err
}

// DeletePool implements nodev1.NodeServer.
func (n *nodeAPI) DeletePool(_ context.Context, r *nodev1.DeletePoolRequest) (*emptypb.Empty, error) {
	return deleted(r, n.Service.DeletePool)
}

// GetFork implements nodev1.NodeServer.
func (n *nodeAPI) GetFork(_ context.Context, r *nodev1.GetForkRequest) (*nodev1.Fork, error) {
	return answered(nodeconv.FromFork)(of(r, n.Service.ForkOf))
}

// ListForks implements nodev1.NodeServer.
func (n *nodeAPI) ListForks(_ context.Context, r *nodev1.ListForksRequest) (*nodev1.ListForksResponse, error) {
	items, next, err := pageOf(r, n.Service.Forks, func(f sandbox.Fork) string { return string(f.Name) }, plain(nodeconv.FromFork))
	return &nodev1.ListForksResponse{Forks: items, Next: next}, err
}

// DeleteFork implements nodev1.NodeServer.
func (n *nodeAPI) DeleteFork(ctx context.Context, r *nodev1.DeleteForkRequest) (*emptypb.Empty, error) {
	return deleted(r, func(k sandbox.Key) error { return n.Service.DeleteFork(ctx, k) })
}

// GetCheckpoint implements nodev1.NodeServer.
func (n *nodeAPI) GetCheckpoint(_ context.Context, r *nodev1.GetCheckpointRequest) (*nodev1.Checkpoint, error) {
	return answered(nodeconv.FromCheckpoint)(of(r, n.Service.CheckpointOf))
}

// ListCheckpoints implements nodev1.NodeServer.
func (n *nodeAPI) ListCheckpoints(_ context.Context, r *nodev1.ListCheckpointsRequest) (*nodev1.ListCheckpointsResponse, error) {
	items, next, err := pageOf(r, n.Service.Checkpoints, func(c sandbox.CheckpointSize) string { return string(c.Name) }, plain(nodeconv.FromCheckpoint))
	return &nodev1.ListCheckpointsResponse{Checkpoints: items, Next: next}, err
}

// DeleteCheckpoint implements nodev1.NodeServer.
func (n *nodeAPI) DeleteCheckpoint(_ context.Context, r *nodev1.DeleteCheckpointRequest) (*emptypb.Empty, error) {
	return deleted(r, n.Service.DeleteCheckpoint)
}
