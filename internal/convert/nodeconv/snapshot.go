package nodeconv

import (
	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert"
	"agentrun.dev/internal/sandbox"
)

// FromOffer shows an offer.
func FromOffer(o sandbox.Offer) *nodev1.SnapshotOffer {
	return &nodev1.SnapshotOffer{Revision: o.Revision, Stage: stages[o.Stage], Digest: o.Digest, Manifest: o.Manifest, Built: o.Built}
}

// ToOffer reads an offer. The code that uses the offer checks its content.
func ToOffer(g *nodev1.SnapshotOffer) (sandbox.Offer, error) {
	return sandbox.Offer{
		Revision: g.GetRevision(), Stage: inverse(stages, g.GetStage()), Digest: g.GetDigest(), Manifest: g.GetManifest(), Built: g.GetBuilt(),
	}, nil
}

// FromFetch asks for a fetch.
func FromFetch(r sandbox.FetchRequest) *nodev1.FetchSnapshotRequest {
	out := &nodev1.FetchSnapshotRequest{
		Namespace: string(r.Namespace), Name: string(r.Name), Spec: FromTemplateSpec(r.Spec), Owner: string(r.Owner), Offer: FromOffer(r.Offer), Pack: r.Pack,
	}
	for _, p := range r.Peers {
		out.Peers = append(out.Peers, &nodev1.SnapshotPeer{Address: p.Address, Node: p.Node})
	}
	return out
}

// ToFetch reads such a request.
func ToFetch(g *nodev1.FetchSnapshotRequest) (sandbox.FetchRequest, error) {
	spec, err := ToTemplateSpec(g.GetSpec())
	if err != nil {
		return sandbox.FetchRequest{}, err
	}
	offer, err := ToOffer(g.GetOffer())
	if err != nil {
		return sandbox.FetchRequest{}, err
	}
	var r convert.Reader
	out := sandbox.FetchRequest{Key: r.Key(g.GetNamespace(), g.GetName()), Spec: spec, Owner: r.OptionalUID(g.GetOwner()), Offer: offer, Pack: g.GetPack()}
	for _, p := range g.GetPeers() {
		out.Peers = append(out.Peers, sandbox.PeerAddress{Address: p.GetAddress(), Node: p.GetNode()})
	}
	return out, r.Err()
}
