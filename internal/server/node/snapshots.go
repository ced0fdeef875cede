package node

import (
	"context"

	"google.golang.org/grpc"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// snapshots returns the service for other nodes, if the daemon has one.
func (n *nodeAPI) snapshots() (server.Snapshots, error) {
	if n.Snapshots == nil {
		return nil, sandbox.Errorf(sandbox.CodeUnimplemented, "this daemon has no snapshots that travel")
	}
	return n.Snapshots, nil
}

// GetSnapshotOffer implements nodev1.NodeServer.
func (n *nodeAPI) GetSnapshotOffer(ctx context.Context, r *nodev1.GetSnapshotOfferRequest) (*nodev1.SnapshotOffer, error) {
	s, err := n.snapshots()
	if err != nil {
		return nil, err
	}
	return answered(nodeconv.FromOffer)(s.SnapshotOffer(ctx, r.GetDigest()))
}

// FetchSnapshot implements nodev1.NodeServer.
func (n *nodeAPI) FetchSnapshot(ctx context.Context, r *nodev1.FetchSnapshotRequest) (*nodev1.Template, error) {
	s, err := n.snapshots()
	if err != nil {
		return nil, err
	}
	ask, err := nodeconv.ToFetch(r)
	if err != nil {
		return nil, err
	}
	t, err := s.FetchTemplate(ctx, ask)
	if err != nil {
		return nil, err
	}
	return n.nodeTemplate(ctx, t)
}

// GetSnapshotParts implements nodev1.NodeServer.
func (n *nodeAPI) GetSnapshotParts(ctx context.Context, r *nodev1.GetSnapshotPartsRequest) (*nodev1.SnapshotParts, error) {
	s, err := n.snapshots()
	if err != nil {
		return nil, err
	}
	page, err := s.SnapshotDigests(ctx, sandbox.SnapshotRead{Snapshot: r.GetSnapshot(), Layer: r.GetLayer()}, r.GetFrom())
	if err != nil {
		return nil, err
	}
	return &nodev1.SnapshotParts{Digests: page}, nil
}

// ReadSnapshot implements nodev1.NodeServer.
func (n *nodeAPI) ReadSnapshot(r *nodev1.ReadSnapshotRequest, out grpc.ServerStreamingServer[nodev1.SnapshotPart]) error {
	return n.serve(out.Context(), nodev1.Node_ReadSnapshot_FullMethodName, r, func(ctx context.Context) error {
		s, err := n.snapshots()
		if err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(n.serving, cancel)()
		return s.ReadSnapshot(ctx, sandbox.SnapshotRead{Snapshot: r.GetSnapshot(), Layer: r.GetLayer(), Parts: r.GetParts()}, func(number uint32, content []byte) error {
			return out.Send(&nodev1.SnapshotPart{Number: number, Content: content})
		})
	})
}
