package nodeconv

import (
	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert"
	"agentrun.dev/internal/sandbox"
)

// FromNode converts a node's status. The caller adds version, endpoint and
// features.
func FromNode(n sandbox.NodeStatus) *nodev1.NodeStatus {
	out := &nodev1.NodeStatus{
		Engine: n.Engine, CapacityBytes: n.Capacity, ReservedBytes: n.Reserved, Sandboxes: uint32(n.Sandboxes), Hibernated: uint32(n.Hibernated),
		Checkpoints: uint32(n.Checkpoints), CheckpointBytes: n.CheckpointBytes, ResourceVersion: n.ResourceVersion,
		NodeId: n.ID, BootId: n.Boot, StateId: n.State, Features: n.Features,
		StartsWaiting: uint32(n.StartsWaiting), BuildsWaiting: uint32(n.BuildsWaiting),
		CpuProfile: n.CPU.Profile, CpuVendor: n.CPU.Vendor, CpuFeatures: n.CPU.Features, Images: n.Images,
	}
	for _, s := range n.Snapshots {
		out.Snapshots = append(out.Snapshots, &nodev1.NodeSnapshot{
			Namespace: string(s.Template.Namespace), Template: string(s.Template.Name), Revision: s.Revision, Stage: stages[s.Stage],
			Image: s.Image, Digest: s.Digest,
		})
	}
	if c := n.Cordon; c != nil {
		out.Cordon = &nodev1.Cordon{Since: fromTime(c.Since), By: string(c.By), Drain: c.Drain, Left: uint32(c.Left), Sealed: uint32(c.Sealed)}
		for _, p := range c.Problems {
			out.Cordon.Problems = append(out.Cordon.Problems, &nodev1.DrainProblem{Namespace: string(p.Namespace), Name: string(p.Name), Problem: text(p.Problem)})
		}
	}
	return out
}

// ToNode reads a node's status.
func ToNode(g *nodev1.NodeStatus) (sandbox.NodeStatus, error) {
	var r convert.Reader
	n := sandbox.NodeStatus{
		Versioned: versioned(g), ID: g.GetNodeId(), Boot: g.GetBootId(), State: g.GetStateId(), Features: g.GetFeatures(),
		Engine: g.GetEngine(), Capacity: g.GetCapacityBytes(), Reserved: g.GetReservedBytes(),
		Sandboxes: int(g.GetSandboxes()), Hibernated: int(g.GetHibernated()),
		Checkpoints: int(g.GetCheckpoints()), CheckpointBytes: g.GetCheckpointBytes(),
		StartsWaiting: int(g.GetStartsWaiting()), BuildsWaiting: int(g.GetBuildsWaiting()),
		CPU: sandbox.CPU{Profile: g.GetCpuProfile(), Vendor: g.GetCpuVendor(), Features: g.GetCpuFeatures()}, Images: g.GetImages(),
	}
	for _, s := range g.GetSnapshots() {
		n.Snapshots = append(n.Snapshots, sandbox.NodeSnapshot{
			Template: r.Key(s.GetNamespace(), s.GetTemplate()), Revision: s.GetRevision(), Stage: inverse(stages, s.GetStage()),
			Image: s.GetImage(), Digest: s.GetDigest(),
		})
	}
	if c := g.GetCordon(); c != nil {
		n.Cordon = &sandbox.Cordon{Since: toTime(c.GetSince()), By: sandbox.Principal(c.GetBy()), Drain: c.GetDrain(), Left: int(c.GetLeft()), Sealed: int(c.GetSealed())}
		for _, p := range c.GetProblems() {
			n.Cordon.Problems = append(n.Cordon.Problems, sandbox.DrainProblem{Key: r.Key(p.GetNamespace(), p.GetName()), Problem: p.GetProblem()})
		}
	}
	return n, r.Err()
}
