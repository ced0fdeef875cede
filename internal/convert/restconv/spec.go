// Package restconv converts between REST (api/rest) and the vocabulary.
package restconv

import (
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert"
	"agentrun.dev/internal/sandbox"
)

// FromDuration formats a duration; 0 becomes "".
func FromDuration(d time.Duration) rest.Duration {
	if d == 0 {
		return ""
	}
	return d.String()
}

// ToDuration reads a field with a duration; "" is 0.
func ToDuration(field string, s rest.Duration) (time.Duration, error) {
	if s == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return 0, sandbox.Invalid(field, "%s is not a duration such as 90s, 10m or 1h30m", sandbox.Quote(s))
	}
	return d, nil
}

// FromTime omits an unknown time.
func FromTime(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// ToTime returns the zero time for a missing one.
func ToTime(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}

// FromTemplateSpec converts a template's spec, for a PUT of a template and its
// answer.
func FromTemplateSpec(s sandbox.TemplateSpec) rest.TemplateSpec {
	out := rest.TemplateSpec{
		Image: s.Image, Init: s.Init, Env: rest.Env(s.Env), Workdir: s.Workdir, User: s.User,
		MilliCPUs: int64(s.MilliCPUs), Memory: int64(s.Memory), Disk: int64(s.Disk),
		Network: rest.TemplateSpecNetwork(s.Network), NetworkPolicy: fromPolicy(s.NetworkPolicy), BuildNetwork: fromPolicy(s.BuildNetwork),
		TrustNamespaceCA: s.TrustNamespaceCA, BuildTimeout: FromDuration(s.BuildTimeout),
	}
	if w := s.Warmup; w != nil {
		out.Warmup = &rest.Program{Language: w.Language, Text: w.Text}
	}
	if c := s.Ready; c != nil {
		out.Ready = &rest.ReadyCheck{Command: c.Command, Port: int(c.Port), Delay: FromDuration(c.Delay), Timeout: FromDuration(c.Timeout)}
	}
	return out
}

// ToTemplateSpec reads a template's spec, and sets defaults.
func ToTemplateSpec(g rest.TemplateSpec) (sandbox.TemplateSpec, error) {
	var r convert.Reader
	s := sandbox.TemplateSpec{
		Image: g.Image, Init: g.Init, Env: sandbox.Env(g.Env), Workdir: g.Workdir, User: g.User,
		MilliCPUs: r.Size("milliCPUs", g.MilliCPUs), Memory: r.Size("memory", g.Memory), Disk: r.Size("disk", g.Disk),
		Network: sandbox.NetworkMode(g.Network), NetworkPolicy: toPolicy(&r, "networkPolicy", g.NetworkPolicy), BuildNetwork: toPolicy(&r, "buildNetwork", g.BuildNetwork),
		TrustNamespaceCA: g.TrustNamespaceCA, BuildTimeout: r.Duration(ToDuration("buildTimeout", g.BuildTimeout)),
	}
	if s.MilliCPUs == 0 {
		s.MilliCPUs = sandbox.DefaultMilliCPUs
	}
	if s.Memory == 0 {
		s.Memory = sandbox.DefaultMemory
	}
	if w := g.Warmup; w != nil {
		s.Warmup = &sandbox.Program{Language: w.Language, Text: w.Text}
	}
	if c := g.Ready; c != nil {
		if c.Port < 0 || c.Port > 65535 {
			r.Fail(sandbox.Invalid("ready.port", "%d is not a port", c.Port))
		}
		s.Ready = &sandbox.ReadyCheck{
			Command: c.Command, Port: uint16(c.Port),
			Delay: r.Duration(ToDuration("ready.delay", c.Delay)), Timeout: r.Duration(ToDuration("ready.timeout", c.Timeout)),
		}
	}
	return s, r.Err()
}

// FromPoolSpec converts a pool's spec, for a PUT of a pool and its answer.
func FromPoolSpec(s sandbox.PoolSpec) rest.PoolSpec {
	return rest.PoolSpec{
		Template: string(s.Template), Replicas: s.Replicas, SnapshotAfter: rest.Stage(s.Stage),
		MaxSurge: s.MaxSurge, MaxUnavailable: s.MaxUnavailable,
	}
}

// ToPoolSpec reads a pool's spec.
func ToPoolSpec(g rest.PoolSpec) (sandbox.PoolSpec, error) {
	var r convert.Reader
	return sandbox.PoolSpec{
		Template: r.Name(g.Template), Replicas: g.Replicas, Stage: sandbox.Stage(g.SnapshotAfter),
		MaxSurge: g.MaxSurge, MaxUnavailable: g.MaxUnavailable,
	}, r.Err()
}

// FromClaimSpec makes the body of a POST of a sandbox. The caller adds the
// name.
func FromClaimSpec(s sandbox.ClaimSpec) rest.SandboxCreate {
	return rest.SandboxCreate{
		Pool: string(s.Pool), Env: rest.Env(s.Env), Secrets: fromSecretRefs(s.Secrets), Metadata: s.Metadata,
		Timeout: FromDuration(s.Timeout), IdleTimeout: FromDuration(s.IdleTimeout), OnTimeout: rest.OnTimeout(s.OnTimeout), Expires: FromTime(s.Expires),
		NetworkPolicy: fromPolicy(s.NetworkPolicy),
	}
}

// ToClaimSpec reads a claim's spec.
func ToClaimSpec(g rest.SandboxCreate) (sandbox.ClaimSpec, error) {
	if g.Pool == "" {
		return sandbox.ClaimSpec{}, sandbox.Invalid("pool", "a sandbox needs one")
	}
	var r convert.Reader
	s := sandbox.ClaimSpec{Pool: r.Name(g.Pool), Env: sandbox.Env(g.Env), Secrets: toSecretRefs(&r, g.Secrets), Metadata: g.Metadata}
	s.Lifetime = toLifetime(&r, g.Timeout, g.IdleTimeout, g.OnTimeout, g.Expires)
	s.NetworkPolicy = toPolicy(&r, "networkPolicy", g.NetworkPolicy)
	return s, r.Err()
}

// FromRestoreSpec makes the body of a POST that restores a checkpoint. The caller
// adds the sandbox's name.
func FromRestoreSpec(s sandbox.RestoreSpec) rest.CheckpointRestore {
	return rest.CheckpointRestore{
		Env: rest.Env(s.Env), Metadata: s.Metadata,
		Timeout: FromDuration(s.Timeout), IdleTimeout: FromDuration(s.IdleTimeout), OnTimeout: rest.OnTimeout(s.OnTimeout), Expires: FromTime(s.Expires),
	}
}

// ToRestoreSpec reads the settings of a restored sandbox.
func ToRestoreSpec(g rest.CheckpointRestore) (sandbox.RestoreSpec, error) {
	var r convert.Reader
	s := sandbox.RestoreSpec{Env: sandbox.Env(g.Env), Metadata: g.Metadata}
	s.Lifetime = toLifetime(&r, g.Timeout, g.IdleTimeout, g.OnTimeout, g.Expires)
	return s, r.Err()
}

func toLifetime(r *convert.Reader, timeout, idle rest.Duration, action rest.OnTimeout, expires *time.Time) sandbox.Lifetime {
	if expires != nil && expires.IsZero() { // the zero time would mean that it is not set
		r.Fail(sandbox.Invalid("expires", "it is in the year 1"))
	}
	return sandbox.Lifetime{
		Timeout: r.Duration(ToDuration("timeout", timeout)), IdleTimeout: r.Duration(ToDuration("idleTimeout", idle)),
		OnTimeout: sandbox.TimeoutAction(action), Expires: ToTime(expires),
	}
}

func fromSecretRefs(refs []sandbox.SecretRef) (out []rest.SecretRef) {
	for _, r := range refs {
		out = append(out, rest.SecretRef{Name: string(r.Secret), Key: r.Key, Env: r.Env, Inject: fromInject(r.Inject)})
	}
	return out
}

func toSecretRefs(r *convert.Reader, given []rest.SecretRef) (out []sandbox.SecretRef) {
	for _, g := range given {
		out = append(out, sandbox.SecretRef{Secret: r.Name(g.Name), Key: g.Key, Env: g.Env, Inject: toInject(g.Inject)})
	}
	return out
}

// FromForkSpec makes the body of a POST that forks the source. The caller adds the
// fork's name.
func FromForkSpec(s sandbox.ForkSpec) rest.ForkCreate {
	out := rest.ForkCreate{Replicas: s.Replicas, NetworkPolicy: fromPolicy(s.NetworkPolicy), Atomic: s.Atomic, Checkpoint: string(s.Checkpoint)}
	for _, c := range s.Children {
		out.Names = append(out.Names, string(c.Name))
	}
	return out
}

// ToForkSpec reads the spec of a fork of the source.
func ToForkSpec(source sandbox.Name, g rest.ForkCreate) (sandbox.ForkSpec, error) {
	var r convert.Reader
	s := sandbox.ForkSpec{Source: source, Replicas: g.Replicas, NetworkPolicy: toPolicy(&r, "networkPolicy", g.NetworkPolicy), Atomic: g.Atomic, Checkpoint: r.OptionalName(g.Checkpoint)}
	for _, name := range g.Names {
		s.Children = append(s.Children, sandbox.ForkChild{Name: r.Name(name)})
	}
	return s, r.Err()
}

// FromQuota converts the quota of a namespace, for a PUT and its answer.
func FromQuota(q sandbox.Quota) rest.QuotaSpec {
	return rest.QuotaSpec{Memory: int64(q.Memory), Sandboxes: q.Sandboxes, Storage: int64(q.Storage)}
}

// ToQuota reads the quota of a namespace.
func ToQuota(n sandbox.Namespace, g rest.QuotaSpec) (sandbox.Quota, error) {
	var r convert.Reader
	q := sandbox.Quota{Namespace: n, Memory: r.Size("memory", g.Memory), Sandboxes: g.Sandboxes, Storage: r.Size("storage", g.Storage)}
	return q, r.Err()
}

// FromSecretData makes the body of a PUT or PATCH of a secret.
func FromSecretData(d sandbox.SecretData) rest.SecretValues { return rest.SecretValues{Data: d} }

// ToSecretData reads the values in both fields, data and stringData.
func ToSecretData(g rest.SecretValues) (sandbox.SecretData, error) {
	data := sandbox.SecretData{}
	for key, value := range g.Data {
		data[key] = value
	}
	for key, value := range g.StringData {
		if _, twice := data[key]; twice {
			return nil, sandbox.Invalid("stringData", "the key %s is in data as well", sandbox.Quote(key))
		}
		data[key] = []byte(value)
	}
	return data, nil
}
