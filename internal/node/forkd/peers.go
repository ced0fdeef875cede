package forkd

import (
	"context"
	"fmt"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server/remote"
	"agentrun.dev/internal/storage/image"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/pack"
	"agentrun.dev/internal/storage/peer"
	"agentrun.dev/internal/storage/snapshot"
)

// peers gets snapshots from other nodes over gRPC, with the certificate that the node shows to
// others, and from registries.
type peers struct {
	files      access.MutualFiles
	registries image.Registries
	failed     func(error)
}

var _ node.Peers = (*peers)(nil)

// openPeers returns nil if the node has no certificate.
func (d *Daemon) openPeers() node.Peers {
	if d.cfg.NodeListen == "" {
		return nil
	}
	return &peers{
		files: d.cfg.NodeFiles, registries: d.cfg.Pull.Registries,
		failed: func(err error) { d.cfg.Log.Error("the certificate for other nodes", "error", err) },
	}
}

// Dial implements node.Peers.
func (p *peers) Dial(a sandbox.PeerAddress) (node.Peer, error) {
	conn, err := remote.Dial(remote.Target{Address: a.Address, Node: a.Node, Files: p.files, Failed: p.failed, Window: remote.SnapshotWindow})
	if err != nil {
		return nil, err
	}
	return &peerNode{conn, remote.NewSnapshots(conn), a}, nil
}

// Pull implements node.Peers.
func (p *peers) Pull(ctx context.Context, name, dir string, r node.PullRequest) (*snapshot.Snapshot, error) {
	ref, err := image.ParseReference(name)
	if err != nil {
		return nil, err
	}
	limits := pack.DefaultLimits()
	limits.Bytes = peer.MaxLayer // Accept has bounded the size by the manifest
	return pack.Pull(ctx, ref, dir, p.registries, pack.UnpackOptions{Limits: limits, Accept: r.Accept, Lend: r.Lend})
}

// peerNode is another node.
type peerNode struct {
	*remote.Conn
	from    remote.Snapshots
	address sandbox.PeerAddress
}

// Name implements peer.Source.
func (p *peerNode) Name() string { return "node " + p.address.Node + " (" + p.address.Address + ")" }

// Digests implements peer.Source.
func (p *peerNode) Digests(ctx context.Context, snap snapshot.ID, blob layer.Digest, from uint32) (peer.Digests, error) {
	page, err := p.from.Digests(ctx, sandbox.SnapshotRead{Snapshot: snap.String(), Layer: blob.String()}, from)
	if err != nil {
		return nil, refused(err)
	}
	return peer.ParsePage(page)
}

// Read implements peer.Source.
func (p *peerNode) Read(ctx context.Context, snap snapshot.ID, blob layer.Digest, parts []uint32, each func(uint32, []byte) error) error {
	return refused(p.from.Read(ctx, sandbox.SnapshotRead{Snapshot: snap.String(), Layer: blob.String(), Parts: parts}, each))
}

// refused turns an error of another node into one of package peer.
func refused(err error) error {
	if sandbox.HasCode(err, sandbox.CodeCapacity) {
		return fmt.Errorf("%w (%w)", peer.ErrBusy, err)
	}
	return err
}
