package node

import (
	"context"
	"slices"

	"google.golang.org/grpc"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// status shows a node, with the version, the endpoint and the features, which
// only its server knows.
func (n *nodeAPI) status(s sandbox.NodeStatus) *nodev1.NodeStatus {
	out := nodeconv.FromNode(s)
	out.Version, out.Endpoint, out.Features = n.Version, n.Endpoint, FeatureNames()
	return out
}

// GetNode implements nodev1.NodeServer.
func (n *nodeAPI) GetNode(ctx context.Context, _ *nodev1.GetNodeRequest) (*nodev1.NodeStatus, error) {
	return answered(n.status)(n.Service.Node(ctx))
}

// CordonNode implements nodev1.NodeServer.
func (n *nodeAPI) CordonNode(ctx context.Context, _ *nodev1.CordonNodeRequest) (*nodev1.NodeStatus, error) {
	return answered(n.status)(n.Service.Cordon(ctx, false))
}

// DrainNode implements nodev1.NodeServer.
func (n *nodeAPI) DrainNode(ctx context.Context, _ *nodev1.DrainNodeRequest) (*nodev1.NodeStatus, error) {
	return answered(n.status)(n.Service.Cordon(ctx, true))
}

// UncordonNode implements nodev1.NodeServer.
func (n *nodeAPI) UncordonNode(ctx context.Context, _ *nodev1.UncordonNodeRequest) (*nodev1.NodeStatus, error) {
	return answered(n.status)(n.Service.Uncordon(ctx))
}

// objectKinds are the kinds of all objects in namespaces.
var objectKinds = []sandbox.Kind{
	sandbox.KindTemplate, sandbox.KindPool, sandbox.KindSandbox, sandbox.KindFork, sandbox.KindCheckpoint,
}

// Watch implements nodev1.NodeServer.
func (n *nodeAPI) Watch(r *nodev1.WatchRequest, out grpc.ServerStreamingServer[nodev1.WatchEvent]) error {
	return n.serve(out.Context(), nodev1.Node_Watch_FullMethodName, r, func(ctx context.Context) error {
		ask, err := nodeconv.ToWatch(r)
		if err != nil {
			return err
		}
		who := server.PrincipalOf(ctx)
		switch mayNode := who.May(access.Observe) && ask.Namespace == ""; {
		case slices.Contains(ask.Kinds, sandbox.KindNode) && !mayNode:
			return sandbox.Errorf(sandbox.CodeDenied, "the node is watched by those who may look at it, with all namespaces").Try("Leave OBJECT_KIND_NODE out")
		case len(ask.Kinds) == 0 && !mayNode:
			ask.Kinds = objectKinds
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(n.serving, cancel)()
		err = n.Service.Watch(ctx, ask, func(e sandbox.Event) error {
			shown := nodeconv.FromEvent(e)
			if e.Node != nil {
				shown.Object = &nodev1.WatchEvent_Node{Node: n.status(*e.Node)}
			}
			return out.Send(shown)
		})
		if n.serving.Err() != nil {
			return sandbox.Errorf(sandbox.CodeClosing, "the daemon is shutting down").Try("Watch again when it is back")
		}
		return err
	})
}
