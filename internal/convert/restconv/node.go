package restconv

import (
	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert"
	"agentrun.dev/internal/sandbox"
)

// FromNode converts a node's status.
func FromNode(n sandbox.NodeStatus) rest.Node {
	out := rest.Node{
		Id: n.ID, Boot: n.Boot, State: n.State, ResourceVersion: fromVersion(n.ResourceVersion),
		Cpu:    rest.CPU{Profile: n.CPU.Profile, Vendor: n.CPU.Vendor, Features: append([]string{}, n.CPU.Features...)},
		Engine: n.Engine, Capacity: int64(n.Capacity), Reserved: int64(n.Reserved), Sandboxes: n.Sandboxes, Hibernated: n.Hibernated,
		Checkpoints: n.Checkpoints, CheckpointBytes: int64(n.CheckpointBytes),
		StartsWaiting: n.StartsWaiting, BuildsWaiting: n.BuildsWaiting, Snapshots: []rest.NodeSnapshot{},
		Images: append([]string{}, n.Images...),
	}
	for _, s := range n.Snapshots {
		out.Snapshots = append(out.Snapshots, rest.NodeSnapshot{
			Namespace: string(s.Template.Namespace), Template: string(s.Template.Name), Revision: s.Revision, Stage: rest.Stage(s.Stage),
			Image: s.Image, Digest: s.Digest,
		})
	}
	if c := n.Cordon; c != nil {
		out.Cordon = &rest.Cordon{Since: c.Since, By: string(c.By), Drain: c.Drain, Left: c.Left, Sealed: c.Sealed}
		for _, p := range c.Problems {
			out.Cordon.Problems = append(out.Cordon.Problems, rest.DrainProblem{Namespace: string(p.Namespace), Name: string(p.Name), Problem: p.Problem})
		}
	}
	return out
}

// ToNode reads a node's status.
func ToNode(g rest.Node) (sandbox.NodeStatus, error) {
	var r convert.Reader
	n := sandbox.NodeStatus{
		ID: g.Id, Boot: g.Boot, State: g.State, Versioned: toVersion(&r, g.ResourceVersion),
		CPU:    sandbox.CPU{Profile: g.Cpu.Profile, Vendor: g.Cpu.Vendor, Features: g.Cpu.Features},
		Engine: g.Engine, Capacity: r.Size("capacity", g.Capacity), Reserved: r.Size("reserved", g.Reserved),
		Sandboxes: g.Sandboxes, Hibernated: g.Hibernated, Checkpoints: g.Checkpoints, CheckpointBytes: r.Size("checkpointBytes", g.CheckpointBytes),
		StartsWaiting: g.StartsWaiting, BuildsWaiting: g.BuildsWaiting, Images: g.Images,
	}
	for _, s := range g.Snapshots {
		n.Snapshots = append(n.Snapshots, sandbox.NodeSnapshot{
			Template: r.Key(s.Namespace, s.Template), Revision: s.Revision, Stage: sandbox.Stage(s.Stage), Image: s.Image, Digest: s.Digest,
		})
	}
	if c := g.Cordon; c != nil {
		n.Cordon = &sandbox.Cordon{Since: c.Since, By: sandbox.Principal(c.By), Drain: c.Drain, Left: c.Left, Sealed: c.Sealed}
		for _, p := range c.Problems {
			n.Cordon.Problems = append(n.Cordon.Problems, sandbox.DrainProblem{Key: r.Key(p.Namespace, p.Name), Problem: p.Problem})
		}
	}
	return n, r.Err()
}
