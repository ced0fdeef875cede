package remote

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/sandbox"
)

// SnapshotOffer returns the offer that another node needs to fetch a template's
// snapshot.
func (s *Service) SnapshotOffer(ctx context.Context, digest string) (sandbox.Offer, error) {
	if err := s.needs(ctx, "snapshots"); err != nil {
		return sandbox.Offer{}, err
	}
	return read(ctx, nodeconv.ToOffer)(s.node.GetSnapshotOffer(ctx, &nodev1.GetSnapshotOfferRequest{Digest: digest}))
}

// FetchTemplate makes a template whose snapshot the node fetches.
func (s *Service) FetchTemplate(ctx context.Context, r sandbox.FetchRequest) (sandbox.Template, error) {
	if err := s.needs(ctx, "snapshots"); err != nil {
		return sandbox.Template{}, err
	}
	return read(ctx, toTemplate)(s.node.FetchSnapshot(ctx, nodeconv.FromFetch(r)))
}

// Snapshots reads snapshots of another node, with the certificate of a node. It does not know
// the features of that node, because it may not ask for them: a node that serves no snapshots
// answers with an error.
type Snapshots struct{ node nodev1.NodeClient }

// NewSnapshots makes a Snapshots over a connection, which stays the caller's.
func NewSnapshots(conn grpc.ClientConnInterface) Snapshots {
	return Snapshots{nodev1.NewNodeClient(conn)}
}

// SnapshotWindow is the Window for connections on which parts are read: room for two parts that
// are under way, and for as much ahead.
const SnapshotWindow = 4 << 20

// Bounds of messages with parts of snapshots, because their sender is not trusted.
var (
	maxPage = grpc.MaxCallRecvMsgSize(1 << 20)
	maxPart = grpc.MaxCallRecvMsgSize(2 << 20)
)

// Digests returns a page of the digests of a layer's parts.
func (s Snapshots) Digests(ctx context.Context, r sandbox.SnapshotRead, from uint32) ([]byte, error) {
	got, err := s.node.GetSnapshotParts(ctx, &nodev1.GetSnapshotPartsRequest{Snapshot: r.Snapshot, Layer: r.Layer, From: from}, maxPage)
	if err != nil {
		return nil, problem(ctx, err)
	}
	return got.GetDigests(), nil
}

// Read asks for parts of a layer, and calls each with every part that comes. It returns the
// error of each.
func (s Snapshots) Read(ctx context.Context, r sandbox.SnapshotRead, each func(number uint32, content []byte) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the call
	in, err := s.node.ReadSnapshot(ctx, &nodev1.ReadSnapshotRequest{Snapshot: r.Snapshot, Layer: r.Layer, Parts: r.Parts}, maxPart)
	if err != nil {
		return problem(ctx, err)
	}
	for {
		part, err := in.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return problem(ctx, err)
		}
		if err := each(part.GetNumber(), part.GetContent()); err != nil {
			return err
		}
	}
}
