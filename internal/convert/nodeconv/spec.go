package nodeconv

import (
	"google.golang.org/protobuf/types/known/durationpb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert"
	"agentrun.dev/internal/sandbox"
)

// FromTemplateSpec converts a template's spec, for ApplyTemplate and its
// answer.
func FromTemplateSpec(s sandbox.TemplateSpec) *nodev1.TemplateSpec {
	out := &nodev1.TemplateSpec{
		Image: s.Image, Init: s.Init, Env: s.Env, Workdir: s.Workdir, User: s.User, MilliCpus: s.MilliCPUs, MemoryBytes: s.Memory,
		DiskBytes: s.Disk, Network: string(s.Network), NetworkPolicy: fromPolicy(s.NetworkPolicy), BuildNetwork: fromPolicy(s.BuildNetwork),
		TrustNamespaceCa: s.TrustNamespaceCA, BuildTimeout: fromDuration(s.BuildTimeout),
	}
	if w := s.Warmup; w != nil {
		out.Warmup = &nodev1.Program{Language: w.Language, Text: w.Text}
	}
	if r := s.Ready; r != nil {
		out.Ready = &nodev1.ReadyCheck{Timeout: fromDuration(r.Timeout)}
		switch {
		case r.Command != "":
			out.Ready.Check = &nodev1.ReadyCheck_Command{Command: r.Command}
		case r.Port != 0:
			out.Ready.Check = &nodev1.ReadyCheck_Port{Port: uint32(r.Port)}
		default:
			out.Ready.Check = &nodev1.ReadyCheck_Delay{Delay: durationpb.New(r.Delay)}
		}
	}
	return out
}

// ToTemplateSpec reads a template's spec, and sets defaults.
func ToTemplateSpec(g *nodev1.TemplateSpec) (sandbox.TemplateSpec, error) {
	var r convert.Reader
	s := sandbox.TemplateSpec{
		Image: g.GetImage(), Init: g.GetInit(), Env: g.GetEnv(), Workdir: g.GetWorkdir(), User: g.GetUser(),
		MilliCPUs: sandbox.DefaultMilliCPUs, Memory: sandbox.DefaultMemory, Disk: g.GetDiskBytes(), Network: sandbox.NetworkMode(g.GetNetwork()),
		NetworkPolicy: toPolicy(&r, "spec.network_policy", g.GetNetworkPolicy()), BuildNetwork: toPolicy(&r, "spec.build_network", g.GetBuildNetwork()),
		TrustNamespaceCA: g.GetTrustNamespaceCa(), BuildTimeout: r.Duration(ToDuration("spec.build_timeout", g.GetBuildTimeout())),
	}
	if n := g.GetMilliCpus(); n > 0 {
		s.MilliCPUs = n
	}
	if n := g.GetMemoryBytes(); n > 0 {
		s.Memory = n
	}
	if w := g.GetWarmup(); w != nil {
		s.Warmup = &sandbox.Program{Language: w.GetLanguage(), Text: w.GetText()}
	}
	if c := g.GetReady(); c != nil {
		if c.GetPort() > 65535 {
			r.Fail(sandbox.Invalid("spec.ready.port", "%d is not a port", c.GetPort()))
		}
		s.Ready = &sandbox.ReadyCheck{
			Command: c.GetCommand(), Port: uint16(c.GetPort()),
			Delay: r.Duration(ToDuration("spec.ready.delay", c.GetDelay())), Timeout: r.Duration(ToDuration("spec.ready.timeout", c.GetTimeout())),
		}
	}
	return s, r.Err()
}

// FromPoolSpec converts a pool's spec, for ApplyPool and its answer.
func FromPoolSpec(s sandbox.PoolSpec) *nodev1.PoolSpec {
	return &nodev1.PoolSpec{
		Template: string(s.Template), Replicas: uint32(s.Replicas), SnapshotAfter: stages[s.Stage],
		MaxSurge: convert.Number[uint32](s.MaxSurge), MaxUnavailable: convert.Number[uint32](s.MaxUnavailable),
	}
}

// ToPoolSpec reads a pool's spec.
func ToPoolSpec(g *nodev1.PoolSpec) (sandbox.PoolSpec, error) {
	var r convert.Reader
	return sandbox.PoolSpec{
		Template: r.Name(g.GetTemplate()), Replicas: int(g.GetReplicas()), Stage: inverse(stages, g.GetSnapshotAfter()),
		MaxSurge: convert.Number[int](g.MaxSurge), MaxUnavailable: convert.Number[int](g.MaxUnavailable),
	}, r.Err()
}

// FromClaim is for ClaimSandbox. The caller adds the request's identity.
func FromClaim(r sandbox.ClaimRequest) *nodev1.ClaimSandboxRequest {
	s := r.Spec
	return &nodev1.ClaimSandboxRequest{
		Namespace: string(r.Namespace), Name: string(r.Name),
		Pool: string(s.Pool), Env: s.Env, Metadata: s.Metadata, Lifetime: fromLifetime(s.Lifetime), NetworkPolicy: fromPolicy(s.NetworkPolicy),
		Owner: string(r.Owner), TokenSha256: string(r.Token), SecretValues: r.Values, Secrets: fromSecretRefs(s.Secrets),
	}
}

// ToClaim reads the request of a claim. The caller adds the namespace, the name and the
// request's identity.
func ToClaim(g *nodev1.ClaimSandboxRequest) (sandbox.ClaimRequest, error) {
	var r convert.Reader
	return sandbox.ClaimRequest{
		Spec: sandbox.ClaimSpec{
			Pool: r.Name(g.GetPool()), Env: g.GetEnv(), Metadata: g.GetMetadata(), Lifetime: toLifetime(&r, g.GetLifetime()),
			NetworkPolicy: toPolicy(&r, "network_policy", g.GetNetworkPolicy()), Secrets: toSecretRefs(&r, g.GetSecrets()),
		},
		Owner: r.OptionalUID(g.GetOwner()), Token: r.OptionalTokenHash(g.GetTokenSha256()), Values: g.GetSecretValues(),
	}, r.Err()
}

// FromPrecondition converts the precondition of a call; an empty one becomes
// nil.
func FromPrecondition(p sandbox.Precondition) *nodev1.Precondition {
	if p == (sandbox.Precondition{}) {
		return nil
	}
	return &nodev1.Precondition{Id: string(p.ID), Owner: string(p.Owner), ResourceVersion: p.Version}
}

// ToPrecondition reads the precondition of a call.
func ToPrecondition(g *nodev1.Precondition) (sandbox.Precondition, error) {
	var r convert.Reader
	return sandbox.Precondition{ID: r.OptionalID(g.GetId()), Owner: r.OptionalUID(g.GetOwner()), Version: g.GetResourceVersion()}, r.Err()
}

// FromRestoreSpec makes the request of RestoreCheckpoint. The caller adds
// namespace, names and idempotency key.
func FromRestoreSpec(s sandbox.RestoreSpec) *nodev1.RestoreCheckpointRequest {
	return &nodev1.RestoreCheckpointRequest{Env: s.Env, Metadata: s.Metadata, Lifetime: fromLifetime(s.Lifetime)}
}

// ToRestoreSpec reads the settings of a restored sandbox.
func ToRestoreSpec(g *nodev1.RestoreCheckpointRequest) (sandbox.RestoreSpec, error) {
	var r convert.Reader
	return sandbox.RestoreSpec{Env: g.GetEnv(), Metadata: g.GetMetadata(), Lifetime: toLifetime(&r, g.GetLifetime())}, r.Err()
}

// FromForkSpec makes the request of ForkSandbox. The caller adds namespace, name
// and idempotency key.
func FromForkSpec(s sandbox.ForkSpec) *nodev1.ForkSandboxRequest {
	out := &nodev1.ForkSandboxRequest{Source: string(s.Source), Replicas: uint32(s.Replicas), NetworkPolicy: fromPolicy(s.NetworkPolicy), Atomic: s.Atomic, Checkpoint: string(s.Checkpoint)}
	for _, c := range s.Children {
		out.Children = append(out.Children, &nodev1.ForkChild{Name: string(c.Name), Owner: string(c.Owner), TokenSha256: string(c.Token)})
	}
	return out
}

// ToForkSpec reads a fork's spec.
func ToForkSpec(g *nodev1.ForkSandboxRequest) (sandbox.ForkSpec, error) {
	var r convert.Reader
	s := sandbox.ForkSpec{
		Source: r.Name(g.GetSource()), Replicas: int(g.GetReplicas()), NetworkPolicy: toPolicy(&r, "network_policy", g.GetNetworkPolicy()),
		Atomic: g.GetAtomic(), Checkpoint: r.OptionalName(g.GetCheckpoint()),
	}
	for _, c := range g.GetChildren() {
		s.Children = append(s.Children, sandbox.ForkChild{
			Name: r.OptionalName(c.GetName()), Owner: r.OptionalUID(c.GetOwner()), Token: r.OptionalTokenHash(c.GetTokenSha256()),
		})
	}
	return s, r.Err()
}

func fromLifetime(l sandbox.Lifetime) *nodev1.Lifetime {
	return &nodev1.Lifetime{Timeout: fromDuration(l.Timeout), IdleTimeout: fromDuration(l.IdleTimeout), OnTimeout: actions[l.OnTimeout], Expires: fromTime(l.Expires)}
}

func toLifetime(r *convert.Reader, g *nodev1.Lifetime) sandbox.Lifetime {
	return sandbox.Lifetime{
		Timeout:     r.Duration(ToDuration("lifetime.timeout", g.GetTimeout())),
		IdleTimeout: r.Duration(ToDuration("lifetime.idle_timeout", g.GetIdleTimeout())),
		OnTimeout:   inverse(actions, g.GetOnTimeout()),
		Expires:     r.Time(ToExpiry("lifetime.expires", g.GetExpires())),
	}
}
