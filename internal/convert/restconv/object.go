package restconv

import (
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert"
	"agentrun.dev/internal/sandbox"
)

// FromTemplate converts a template and the state of its builds.
func FromTemplate(t sandbox.Template, builds []sandbox.Build) rest.Template {
	out := rest.Template{
		Namespace: string(t.Namespace), Name: string(t.Name), Revision: t.Revision, Created: t.Created,
		Phase: rest.PhasePending, Builds: []rest.Build{}, Spec: FromTemplateSpec(t.Spec), ResourceVersion: fromVersion(t.ResourceVersion), Owner: string(t.Owner),
	}
	for _, b := range builds {
		out.Builds = append(out.Builds, rest.Build{
			Stage: rest.Stage(b.Stage), Phase: rest.Phase(b.Phase), Problem: b.Problem, Cause: b.Cause, Image: b.Image,
			Started: b.Started, Finished: FromTime(b.Finished), Attempts: b.Attempts, Next: FromTime(b.Next),
		})
		if b.Stage == sandbox.AfterReady {
			out.Phase, out.Problem = rest.Phase(b.Phase), b.Problem
		}
	}
	return out
}

// ToTemplate reads a template and its builds, as far as the API shows them.
func ToTemplate(g rest.Template) (t sandbox.Template, builds []sandbox.Build, err error) {
	var r convert.Reader
	t = sandbox.Template{Key: r.Key(g.Namespace, g.Name), Versioned: toVersion(&r, g.ResourceVersion), Revision: g.Revision, Created: g.Created, Owner: r.OptionalUID(g.Owner)}
	if t.Spec, err = ToTemplateSpec(g.Spec); err != nil {
		r.Fail(err)
	}
	for _, b := range g.Builds {
		builds = append(builds, sandbox.Build{
			Template: t.Key, Revision: t.Revision, Stage: sandbox.Stage(b.Stage), Phase: sandbox.Phase(b.Phase), Problem: b.Problem, Cause: b.Cause,
			Started: b.Started, Finished: ToTime(b.Finished), Attempts: b.Attempts, Next: ToTime(b.Next), Built: sandbox.Built{Image: b.Image},
		})
	}
	return t, builds, r.Err()
}

// FromPool converts a pool and its status.
func FromPool(p sandbox.Pool, status sandbox.PoolStatus) rest.Pool {
	return rest.Pool{
		Namespace: string(p.Namespace), Name: string(p.Name), Created: p.Created, Spec: FromPoolSpec(p.Spec),
		Phase: rest.Phase(status.Phase), Ready: status.Ready, Snapshots: status.Snapshots, Problem: status.Problem,
		ResourceVersion: fromVersion(p.ResourceVersion), Owner: string(p.Owner),
	}
}

// ToPool reads a pool and its status.
func ToPool(g rest.Pool) (p sandbox.Pool, status sandbox.PoolStatus, err error) {
	var r convert.Reader
	p = sandbox.Pool{Key: r.Key(g.Namespace, g.Name), Versioned: toVersion(&r, g.ResourceVersion), Created: g.Created, Owner: r.OptionalUID(g.Owner)}
	if p.Spec, err = ToPoolSpec(g.Spec); err != nil {
		r.Fail(err)
	}
	return p, sandbox.PoolStatus{Phase: sandbox.Phase(g.Phase), Ready: g.Ready, Snapshots: g.Snapshots, Problem: g.Problem}, r.Err()
}

// FromSandbox omits the environment: it may hold values that must not be
// visible to everyone who can list sandboxes. The server adds tokens.
func FromSandbox(s sandbox.Sandbox) rest.Sandbox {
	return rest.Sandbox{
		Namespace: string(s.Namespace), Name: string(s.Name), Id: string(s.ID), State: rest.SandboxState(s.State),
		Pool: string(s.Pool), Template: string(s.Template), Revision: s.Revision, Engine: s.Engine,
		Metadata: s.Metadata, Workdir: s.Workdir, User: s.User, Memory: int64(s.Memory),
		Secrets: fromSecretRefs(s.Secrets), SecretsBy: string(s.SecretsBy),
		Parent: string(s.Parent), Fork: string(s.Fork), Checkpoint: string(s.Checkpoint), Created: s.Created, Ended: FromTime(s.Ended),
		Reason: rest.SandboxReason(s.Reason), Detail: s.Detail, Unresponsive: s.Unresponsive,
		Timeout: FromDuration(s.Timeout), IdleTimeout: FromDuration(s.IdleTimeout), OnTimeout: rest.OnTimeout(s.OnTimeout), Expires: FromTime(s.Expires),
		NetworkPolicy: fromPolicy(s.Egress.Own), NetworkBounds: fromPolicies(s.Egress.Bounds),
		ResourceVersion: fromVersion(s.ResourceVersion), Owner: string(s.Owner),
	}
}

// ToSandbox reads a sandbox, as far as the API shows it.
func ToSandbox(g rest.Sandbox) (sandbox.Sandbox, error) {
	var r convert.Reader
	s := sandbox.Sandbox{
		Key: r.Key(g.Namespace, g.Name), Versioned: toVersion(&r, g.ResourceVersion), ID: r.ID(g.Id), State: sandbox.State(g.State),
		Pool: r.OptionalName(g.Pool), Template: r.OptionalName(g.Template), Revision: g.Revision, Engine: g.Engine,
		Metadata: g.Metadata, Workdir: g.Workdir, User: g.User, Memory: r.Size("memory", g.Memory),
		Secrets: toSecretRefs(&r, g.Secrets), SecretsBy: sandbox.Principal(g.SecretsBy),
		Parent: r.OptionalID(g.Parent), Fork: r.OptionalName(g.Fork), Checkpoint: r.OptionalName(g.Checkpoint),
		Created: g.Created, Ended: ToTime(g.Ended), Reason: sandbox.Reason(g.Reason), Detail: g.Detail, Unresponsive: g.Unresponsive,
		Lifetime: toLifetime(&r, g.Timeout, g.IdleTimeout, g.OnTimeout, g.Expires), Owner: r.OptionalUID(g.Owner),
		Egress: sandbox.Egress{Own: toPolicy(&r, "networkPolicy", g.NetworkPolicy), Bounds: toPolicies(&r, g.NetworkBounds)},
	}
	return s, r.Err()
}

// FromFork converts a fork. The server adds the tokens of its children.
func FromFork(f sandbox.Fork) rest.Fork {
	out := rest.Fork{
		Namespace: string(f.Namespace), Name: string(f.Name), Source: string(f.Source), SourceID: string(f.SourceID),
		Replicas: f.Replicas, Created: f.Created, Phase: rest.Phase(f.Phase), Pause: FromDuration(f.Pause),
		By: string(f.By), HoldsSecrets: f.HoldsSecrets, ResourceVersion: fromVersion(f.ResourceVersion), Checkpoint: string(f.Checkpoint),
		Children: make([]rest.ForkOutcome, 0, len(f.Children)),
	}
	for _, c := range f.Children {
		out.Children = append(out.Children, rest.ForkOutcome{Name: string(c.Name), Id: string(c.ID), Problem: c.Problem, Owner: string(c.Owner)})
	}
	return out
}

// ToFork reads a fork.
func ToFork(g rest.Fork) (sandbox.Fork, error) {
	var r convert.Reader
	f := sandbox.Fork{
		Key: r.Key(g.Namespace, g.Name), Versioned: toVersion(&r, g.ResourceVersion), Source: r.Name(g.Source), SourceID: r.OptionalID(g.SourceID),
		Replicas: g.Replicas, Created: g.Created, Phase: sandbox.Phase(g.Phase), Pause: r.Duration(ToDuration("pause", g.Pause)),
		By: sandbox.Principal(g.By), HoldsSecrets: g.HoldsSecrets, Checkpoint: r.OptionalName(g.Checkpoint),
	}
	for _, c := range g.Children {
		f.Children = append(f.Children, sandbox.ForkOutcome{Name: r.Name(c.Name), ID: r.OptionalID(c.Id), Problem: c.Problem, Owner: r.OptionalUID(c.Owner)})
	}
	return f, r.Err()
}

// FromCheckpoint omits the environment, as FromSandbox does.
func FromCheckpoint(c sandbox.CheckpointSize) rest.Checkpoint {
	return rest.Checkpoint{
		Namespace: string(c.Namespace), Name: string(c.Name), Id: string(c.ID),
		Source: string(c.Of.Name), SourceID: string(c.Of.ID),
		Pool: string(c.Of.Pool), Template: string(c.Of.Template), Revision: c.Of.Revision, Engine: c.Of.Engine,
		Workdir: c.Of.Workdir, User: c.Of.User, Memory: int64(c.Of.Memory), Created: c.Created,
		Size: int64(c.Stored), Unshared: int64(c.Unshared), ResourceVersion: fromVersion(c.ResourceVersion),
	}
}

// ToCheckpoint reads a complete checkpoint, as far as the API shows it.
func ToCheckpoint(g rest.Checkpoint) (sandbox.CheckpointSize, error) {
	var r convert.Reader
	c := sandbox.Checkpoint{
		Key: r.Key(g.Namespace, g.Name), Versioned: toVersion(&r, g.ResourceVersion), ID: r.ID(g.Id), Phase: sandbox.PhaseReady, Created: g.Created,
		Of: sandbox.Sandbox{
			Key: r.Key(g.Namespace, g.Source), ID: r.ID(g.SourceID), Pool: r.OptionalName(g.Pool), Template: r.OptionalName(g.Template),
			Revision: g.Revision, Engine: g.Engine, Workdir: g.Workdir, User: g.User, Memory: r.Size("memory", g.Memory),
		},
	}
	return sandbox.CheckpointSize{Checkpoint: c, Size: sandbox.Size{Stored: r.Size("size", g.Size), Unshared: r.Size("unshared", g.Unshared)}}, r.Err()
}

// FromCost converts the cost of a sandbox, with the sandbox's names and state.
func FromCost(c sandbox.Cost) rest.SandboxStats {
	return rest.SandboxStats{
		Namespace: string(c.Namespace), Name: string(c.Name), Id: string(c.ID), State: rest.SandboxState(c.State), Time: c.At,
		Reserved: int64(c.Reserved), Own: int64(c.Own), Shared: int64(c.Proportional - min(c.Own, c.Proportional)),
		Cpu: c.CPU.Nanoseconds(), Generation: int64(c.Generation), Disk: int64(c.Disk),
		NetworkSent: int64(c.Network.Sent), NetworkReceived: int64(c.Network.Received),
		NetworkConnections: int64(c.Network.Connections), NetworkRefused: int64(c.Network.Refused),
	}
}

// ToCost reads the cost of a sandbox.
func ToCost(g rest.SandboxStats) (sandbox.Cost, error) {
	var r convert.Reader
	c := sandbox.Cost{
		Sandbox: sandbox.Sandbox{Key: r.Key(g.Namespace, g.Name), ID: r.ID(g.Id), State: sandbox.State(g.State)},
		At:      g.Time, Reserved: r.Size("reserved", g.Reserved),
		Stats: sandbox.Stats{
			Own: r.Size("own", g.Own), Proportional: r.Size("own", g.Own) + r.Size("shared", g.Shared), Disk: r.Size("disk", g.Disk),
			CPU: time.Duration(r.Size("cpu", g.Cpu)), Generation: r.Size("generation", g.Generation),
		},
		Network: sandbox.NetworkUse{
			Sent: r.Size("networkSent", g.NetworkSent), Received: r.Size("networkReceived", g.NetworkReceived),
			Connections: r.Size("networkConnections", g.NetworkConnections), Refused: r.Size("networkRefused", g.NetworkRefused),
		},
	}
	return c, r.Err()
}

// FromQuotaUse converts a quota and its use.
func FromQuotaUse(q sandbox.QuotaUse) rest.Quota {
	return rest.Quota{
		Namespace: string(q.Namespace), Spec: FromQuota(q.Quota),
		Used: rest.QuotaUse{Memory: int64(q.UsedMemory), Sandboxes: q.UsedSandboxes, Storage: int64(q.UsedStorage)},
	}
}

// ToQuotaUse reads a quota and its use.
func ToQuotaUse(g rest.Quota) (q sandbox.QuotaUse, err error) {
	n, err := sandbox.ParseNamespace(g.Namespace)
	if err != nil {
		return q, err
	}
	if q.Quota, err = ToQuota(n, g.Spec); err != nil {
		return q, err
	}
	var r convert.Reader
	q.UsedMemory, q.UsedSandboxes, q.UsedStorage = r.Size("used.memory", g.Used.Memory), g.Used.Sandboxes, r.Size("used.storage", g.Used.Storage)
	return q, r.Err()
}

// FromSecret converts the public part of a secret, without its values.
func FromSecret(s sandbox.Secret) rest.Secret {
	return rest.Secret{Namespace: string(s.Namespace), Name: string(s.Name), Keys: s.Keys, Created: s.Created, Changed: s.Changed}
}

// ToSecret reads the public part of a secret.
func ToSecret(g rest.Secret) (sandbox.Secret, error) {
	var r convert.Reader
	return sandbox.Secret{Key: r.Key(g.Namespace, g.Name), Keys: g.Keys, Created: g.Created, Changed: g.Changed}, r.Err()
}

// FromError converts an error.
func FromError(e *sandbox.Error) rest.Error {
	return rest.Error{Code: rest.ErrorCode(e.Code), Message: e.Message, Cause: e.Cause, Remediation: e.Remediation}
}

// ToError reads an error.
func ToError(g rest.Error) *sandbox.Error {
	return &sandbox.Error{Code: sandbox.Code(g.Code), Message: g.Message, Cause: g.Cause, Remediation: g.Remediation}
}
