package remote

import (
	"context"
	"slices"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/sandbox"
)

// Node implements server.Service.
func (s *Service) Node(ctx context.Context) (sandbox.NodeStatus, error) {
	return read(ctx, nodeconv.ToNode)(s.node.GetNode(ctx, &nodev1.GetNodeRequest{}))
}

// needs refuses a call that the node's daemon is too old for. The component itself asks for the
// features, because not every principal may look at a node.
func (s *Service) needs(ctx context.Context, feature string) error {
	if _, has := s.features.Load(feature); has {
		return nil
	}
	n, err := read(ctx, nodeconv.ToNode)(s.self.GetNode(ctx, &nodev1.GetNodeRequest{}))
	if err != nil {
		return err
	}
	for _, f := range n.Features {
		s.features.Store(f, nil)
	}
	if slices.Contains(n.Features, feature) {
		return nil
	}
	return sandbox.Errorf(sandbox.CodeUnimplemented, "the node's API lacks the feature %s", feature).
		Because("its daemon is of an earlier version").Try("Update the daemon of the node")
}

// needsIf is needs, for a call that may use a feature.
func (s *Service) needsIf(ctx context.Context, used bool, feature string) error {
	if !used {
		return nil
	}
	return s.needs(ctx, feature)
}

// Cordon implements server.Service.
func (s *Service) Cordon(ctx context.Context, drain bool) (sandbox.NodeStatus, error) {
	if err := s.needs(ctx, "cordon"); err != nil {
		return sandbox.NodeStatus{}, err
	}
	if drain {
		return read(ctx, nodeconv.ToNode)(s.node.DrainNode(ctx, &nodev1.DrainNodeRequest{}))
	}
	return read(ctx, nodeconv.ToNode)(s.node.CordonNode(ctx, &nodev1.CordonNodeRequest{}))
}

// Uncordon implements server.Service.
func (s *Service) Uncordon(ctx context.Context) (sandbox.NodeStatus, error) {
	if err := s.needs(ctx, "cordon"); err != nil {
		return sandbox.NodeStatus{}, err
	}
	return read(ctx, nodeconv.ToNode)(s.node.UncordonNode(ctx, &nodev1.UncordonNodeRequest{}))
}

// all reports whether a list is of all namespaces, which the node's daemon must
// be able to list.
func (s *Service) all(ctx context.Context, n sandbox.Namespace) (bool, error) {
	if n != "" {
		return false, nil
	}
	return true, s.needs(ctx, "list-all-namespaces")
}

// Version implements server.Service. Each list has it: so the shortest one is asked for.
func (s *Service) Version(ctx context.Context) (sandbox.StateVersion, error) {
	r, err := s.node.ListPools(ctx, &nodev1.ListPoolsRequest{Limit: 1})
	if err != nil {
		return sandbox.StateVersion{}, problem(ctx, err)
	}
	return sandbox.StateVersion{ID: r.GetStateId(), Version: r.GetResourceVersion()}, nil
}

// Watch implements server.Service.
func (s *Service) Watch(ctx context.Context, r sandbox.WatchRequest, each func(sandbox.Event) error) error {
	if err := s.needs(ctx, "watch"); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the call
	w, err := s.node.Watch(ctx, nodeconv.FromWatch(r))
	if err != nil {
		return problem(ctx, err)
	}
	for {
		got, err := w.Recv()
		if err != nil {
			return problem(ctx, err)
		}
		e, err := nodeconv.ToEvent(got)
		if err != nil {
			return err
		}
		if err := each(e); err != nil {
			return err
		}
	}
}
