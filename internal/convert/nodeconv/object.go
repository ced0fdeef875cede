package nodeconv

import (
	"google.golang.org/protobuf/types/known/durationpb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert"
	"agentrun.dev/internal/sandbox"
)

// FromTemplate converts a template and the state of its builds.
func FromTemplate(t sandbox.Template, builds []sandbox.Build) *nodev1.Template {
	out := &nodev1.Template{
		Namespace: string(t.Namespace), Name: string(t.Name), Spec: FromTemplateSpec(t.Spec), Revision: t.Revision,
		Created: fromTime(t.Created), Phase: nodev1.Phase_PHASE_PENDING, ResourceVersion: t.ResourceVersion, Owner: string(t.Owner),
	}
	for _, b := range builds {
		out.Builds = append(out.Builds, &nodev1.Build{
			Stage: stages[b.Stage], Phase: phases[b.Phase], Problem: text(b.Problem), Cause: text(b.Cause), Image: b.Image,
			Started: fromTime(b.Started), Finished: fromTime(b.Finished), Attempts: uint32(b.Attempts), Next: fromTime(b.Next),
		})
		if b.Stage == sandbox.AfterReady {
			out.Phase, out.Problem = phases[b.Phase], b.Problem
		}
	}
	return out
}

// ToTemplate reads a template and its builds, as far as the API shows them.
func ToTemplate(g *nodev1.Template) (t sandbox.Template, builds []sandbox.Build, err error) {
	var r convert.Reader
	t = sandbox.Template{Key: r.Key(g.GetNamespace(), g.GetName()), Versioned: versioned(g), Revision: g.GetRevision(), Created: toTime(g.GetCreated()), Owner: r.OptionalUID(g.GetOwner())}
	if t.Spec, err = ToTemplateSpec(g.GetSpec()); err != nil {
		r.Fail(err)
	}
	for _, b := range g.GetBuilds() {
		builds = append(builds, sandbox.Build{
			Template: t.Key, Revision: t.Revision, Stage: inverse(stages, b.GetStage()), Phase: inverse(phases, b.GetPhase()),
			Problem: b.GetProblem(), Cause: b.GetCause(), Started: toTime(b.GetStarted()), Finished: toTime(b.GetFinished()),
			Attempts: int(b.GetAttempts()), Next: toTime(b.GetNext()), Built: sandbox.Built{Image: b.GetImage()},
		})
	}
	return t, builds, r.Err()
}

// FromPool converts a pool and its status.
func FromPool(p sandbox.Pool, status sandbox.PoolStatus) *nodev1.Pool {
	return &nodev1.Pool{
		Namespace: string(p.Namespace), Name: string(p.Name), Created: fromTime(p.Created), Spec: FromPoolSpec(p.Spec),
		Phase: phases[status.Phase], Problem: text(status.Problem), Ready: uint32(status.Ready), Snapshots: uint32(status.Snapshots),
		ResourceVersion: p.ResourceVersion, Owner: string(p.Owner),
	}
}

// ToPool reads a pool and its status.
func ToPool(g *nodev1.Pool) (p sandbox.Pool, status sandbox.PoolStatus, err error) {
	var r convert.Reader
	p = sandbox.Pool{Key: r.Key(g.GetNamespace(), g.GetName()), Versioned: versioned(g), Created: toTime(g.GetCreated()), Owner: r.OptionalUID(g.GetOwner())}
	if p.Spec, err = ToPoolSpec(g.GetSpec()); err != nil {
		r.Fail(err)
	}
	return p, sandbox.PoolStatus{
		Phase: inverse(phases, g.GetPhase()), Problem: g.GetProblem(), Ready: int(g.GetReady()), Snapshots: int(g.GetSnapshots()),
	}, r.Err()
}

// FromSandbox omits the environment: it may hold values that must not be
// visible to everyone who can list sandboxes.
func FromSandbox(s sandbox.Sandbox) *nodev1.Sandbox {
	return &nodev1.Sandbox{
		Namespace: string(s.Namespace), Name: string(s.Name), Id: string(s.ID), State: states[s.State],
		Pool: string(s.Pool), Template: string(s.Template), Revision: s.Revision, Engine: s.Engine,
		Metadata: s.Metadata, Workdir: s.Workdir, User: s.User, MemoryBytes: s.Memory,
		Parent: string(s.Parent), Fork: string(s.Fork), Checkpoint: string(s.Checkpoint),
		Created: fromTime(s.Created), Ended: fromTime(s.Ended), Reason: reasons[s.Reason], Detail: text(s.Detail), Unresponsive: text(s.Unresponsive),
		Lifetime: fromLifetime(s.Lifetime), NetworkPolicy: fromPolicy(s.Egress.Own), NetworkBounds: fromPolicies(s.Egress.Bounds),
		ResourceVersion: s.ResourceVersion, Owner: string(s.Owner),
	}
}

// ToSandbox reads a sandbox, as far as the API shows it.
func ToSandbox(g *nodev1.Sandbox) (sandbox.Sandbox, error) {
	var r convert.Reader
	s := sandbox.Sandbox{
		Key: r.Key(g.GetNamespace(), g.GetName()), Versioned: versioned(g), ID: r.ID(g.GetId()), State: inverse(states, g.GetState()),
		Pool: r.OptionalName(g.GetPool()), Template: r.OptionalName(g.GetTemplate()), Revision: g.GetRevision(), Engine: g.GetEngine(),
		Metadata: g.GetMetadata(), Workdir: g.GetWorkdir(), User: g.GetUser(), Memory: g.GetMemoryBytes(),
		Parent: r.OptionalID(g.GetParent()), Fork: r.OptionalName(g.GetFork()), Checkpoint: r.OptionalName(g.GetCheckpoint()),
		Created: toTime(g.GetCreated()), Ended: toTime(g.GetEnded()), Reason: inverse(reasons, g.GetReason()), Detail: g.GetDetail(), Unresponsive: g.GetUnresponsive(),
		Lifetime: toLifetime(&r, g.GetLifetime()), Owner: r.OptionalUID(g.GetOwner()),
		Egress: sandbox.Egress{Own: toPolicy(&r, "network_policy", g.GetNetworkPolicy()), Bounds: toPolicies(&r, g.GetNetworkBounds())},
	}
	return s, r.Err()
}

// FromFork converts a fork.
func FromFork(f sandbox.Fork) *nodev1.Fork {
	out := &nodev1.Fork{
		Namespace: string(f.Namespace), Name: string(f.Name), Source: string(f.Source), SourceId: string(f.SourceID),
		Replicas: uint32(f.Replicas), Created: fromTime(f.Created), Phase: phases[f.Phase], Pause: fromDuration(f.Pause),
		ResourceVersion: f.ResourceVersion, Checkpoint: string(f.Checkpoint),
	}
	for _, c := range f.Children {
		out.Children = append(out.Children, &nodev1.ForkOutcome{Name: string(c.Name), Id: string(c.ID), Problem: text(c.Problem), Owner: string(c.Owner)})
	}
	return out
}

// ToFork reads a fork, as far as the API shows it.
func ToFork(g *nodev1.Fork) (sandbox.Fork, error) {
	var r convert.Reader
	f := sandbox.Fork{
		Key: r.Key(g.GetNamespace(), g.GetName()), Versioned: versioned(g), Source: r.Name(g.GetSource()), SourceID: r.OptionalID(g.GetSourceId()),
		Replicas: int(g.GetReplicas()), Created: toTime(g.GetCreated()), Phase: inverse(phases, g.GetPhase()),
		Pause: r.Duration(ToDuration("pause", g.GetPause())), Checkpoint: r.OptionalName(g.GetCheckpoint()),
	}
	for _, c := range g.GetChildren() {
		f.Children = append(f.Children, sandbox.ForkOutcome{Name: r.Name(c.GetName()), ID: r.OptionalID(c.GetId()), Problem: c.GetProblem(), Owner: r.OptionalUID(c.GetOwner())})
	}
	return f, r.Err()
}

// FromCheckpoint omits the environment, as FromSandbox does.
func FromCheckpoint(c sandbox.CheckpointSize) *nodev1.Checkpoint {
	return &nodev1.Checkpoint{
		Namespace: string(c.Namespace), Name: string(c.Name), Id: string(c.ID), Source: string(c.Of.Name), SourceId: string(c.Of.ID),
		Pool: string(c.Of.Pool), Template: string(c.Of.Template), Revision: c.Of.Revision, Engine: c.Of.Engine,
		Workdir: c.Of.Workdir, User: c.Of.User, MemoryBytes: c.Of.Memory, Created: fromTime(c.Created),
		StoredBytes: c.Stored, UnsharedBytes: c.Unshared, ResourceVersion: c.ResourceVersion,
	}
}

// ToCheckpoint reads a complete checkpoint, as far as the API shows it.
func ToCheckpoint(g *nodev1.Checkpoint) (sandbox.CheckpointSize, error) {
	var r convert.Reader
	c := sandbox.Checkpoint{
		Key: r.Key(g.GetNamespace(), g.GetName()), Versioned: versioned(g), ID: r.ID(g.GetId()), Phase: sandbox.PhaseReady, Created: toTime(g.GetCreated()),
		Of: sandbox.Sandbox{
			Key: r.Key(g.GetNamespace(), g.GetSource()), ID: r.ID(g.GetSourceId()),
			Pool: r.OptionalName(g.GetPool()), Template: r.OptionalName(g.GetTemplate()), Revision: g.GetRevision(), Engine: g.GetEngine(),
			Workdir: g.GetWorkdir(), User: g.GetUser(), Memory: g.GetMemoryBytes(),
		},
	}
	return sandbox.CheckpointSize{Checkpoint: c, Size: sandbox.Size{Stored: g.GetStoredBytes(), Unshared: g.GetUnsharedBytes()}}, r.Err()
}

// FromCost converts the cost of a sandbox, with the sandbox's names and state.
func FromCost(c sandbox.Cost) *nodev1.SandboxStats {
	return &nodev1.SandboxStats{
		Namespace: string(c.Namespace), Name: string(c.Name), Id: string(c.ID), State: states[c.State], Time: fromTime(c.At),
		ReservedBytes: c.Reserved, OwnBytes: c.Own, SharedBytes: c.Proportional - min(c.Own, c.Proportional), DiskBytes: c.Disk,
		Cpu: durationpb.New(c.CPU), Generation: c.Generation,
		NetworkSentBytes: c.Network.Sent, NetworkReceivedBytes: c.Network.Received, NetworkConnections: c.Network.Connections, NetworkRefused: c.Network.Refused,
	}
}

// ToCost reads the cost of a sandbox.
func ToCost(g *nodev1.SandboxStats) (sandbox.Cost, error) {
	var r convert.Reader
	c := sandbox.Cost{
		Sandbox: sandbox.Sandbox{Key: r.Key(g.GetNamespace(), g.GetName()), ID: r.ID(g.GetId()), State: inverse(states, g.GetState())},
		At:      toTime(g.GetTime()), Reserved: g.GetReservedBytes(),
		Stats: sandbox.Stats{
			Own: g.GetOwnBytes(), Proportional: g.GetOwnBytes() + g.GetSharedBytes(), Disk: g.GetDiskBytes(),
			CPU: r.Duration(ToDuration("cpu", g.GetCpu())), Generation: g.GetGeneration(),
		},
		Network: sandbox.NetworkUse{
			Sent: g.GetNetworkSentBytes(), Received: g.GetNetworkReceivedBytes(), Connections: g.GetNetworkConnections(), Refused: g.GetNetworkRefused(),
		},
	}
	return c, r.Err()
}

// FromError converts an error to the detail of a status.
func FromError(e *sandbox.Error) *nodev1.Error {
	return &nodev1.Error{Code: string(e.Code), Message: text(e.Message), Cause: text(e.Cause), Remediation: text(e.Remediation)}
}

// ToError reads an error from the detail of a status.
func ToError(g *nodev1.Error) *sandbox.Error {
	return &sandbox.Error{Code: sandbox.Code(g.GetCode()), Message: g.GetMessage(), Cause: g.GetCause(), Remediation: g.GetRemediation()}
}

// versioned reads the resource version of an object.
func versioned(g interface{ GetResourceVersion() uint64 }) sandbox.Versioned {
	return sandbox.Versioned{ResourceVersion: g.GetResourceVersion()}
}
