package node

import (
	"context"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/sandbox"
)

// SetNetworkPolicy implements nodev1.NodeServer.
func (n *nodeAPI) SetNetworkPolicy(ctx context.Context, r *nodev1.SetNetworkPolicyRequest) (*nodev1.Sandbox, error) {
	return verb(ctx, r, func(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
		own, err := nodeconv.ToOwnPolicy(r)
		if err != nil {
			return sandbox.Sandbox{}, err
		}
		return n.Service.SetNetworkPolicy(ctx, k, own, when...)
	})
}

// GetNetworkLog implements nodev1.NodeServer. A call that waits ends with the server.
func (n *nodeAPI) GetNetworkLog(ctx context.Context, r *nodev1.GetNetworkLogRequest) (*nodev1.NetworkLog, error) {
	ask, err := nodeconv.ToTrafficRequest(r)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(n.serving, cancel)()
	return answered(nodeconv.FromTraffic)(n.Service.Traffic(ctx, ask))
}
