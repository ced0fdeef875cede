package node

import (
	"context"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/sandbox"
)

// GetNamespaceCA implements nodev1.NodeServer.
func (n *nodeAPI) GetNamespaceCA(ctx context.Context, r *nodev1.GetNamespaceCARequest) (*nodev1.NamespaceCA, error) {
	namespace, err := sandbox.ParseNamespace(r.GetNamespace())
	if err != nil {
		return nil, err
	}
	return answered(nodeconv.FromNamespaceCA)(n.Service.NamespaceCA(ctx, namespace))
}

// SetNamespaceCA implements nodev1.NodeServer.
func (n *nodeAPI) SetNamespaceCA(ctx context.Context, r *nodev1.SetNamespaceCARequest) (*nodev1.NamespaceCA, error) {
	namespace, err := sandbox.ParseNamespace(r.GetNamespace())
	if err != nil {
		return nil, err
	}
	return answered(nodeconv.FromNamespaceCA)(n.Service.SetNamespaceCA(ctx, namespace, nodeconv.ToCASpec(r)))
}
