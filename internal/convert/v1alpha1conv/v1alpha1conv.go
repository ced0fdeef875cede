// Package v1alpha1conv converts between objects in YAML (api/v1alpha1) and the
// vocabulary. A field that has no effect is an error.
package v1alpha1conv

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"agentrun.dev/api/v1alpha1"
	"agentrun.dev/internal/convert"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/sandbox"
)

// FromTemplateSpec converts a template's spec.
func FromTemplateSpec(s sandbox.TemplateSpec) v1alpha1.SandboxTemplateSpec {
	out := v1alpha1.SandboxTemplateSpec{
		Image: s.Image, Init: s.Init, Env: fromEnv(s.Env), Workdir: s.Workdir, User: s.User,
		Resources: v1alpha1.Resources{
			CPU: *resource.NewMilliQuantity(int64(s.MilliCPUs), resource.DecimalSI), Memory: fromBytes(s.Memory), Disk: fromBytes(s.Disk),
		},
		Network: string(s.Network), NetworkPolicy: fromPolicy(s.NetworkPolicy), BuildNetwork: fromPolicy(s.BuildNetwork),
		TrustNamespaceCA: s.TrustNamespaceCA, BuildTimeout: fromDuration(s.BuildTimeout),
	}
	if r := s.Ready; r != nil {
		out.Ready = &v1alpha1.ReadyCheck{Command: r.Command, Port: int32(r.Port), Delay: fromDuration(r.Delay), Timeout: fromDuration(r.Timeout)}
	}
	if w := s.Warmup; w != nil {
		out.Warmup = &v1alpha1.Warmup{Language: w.Language, Code: w.Text}
	}
	return out
}

// ToTemplateSpec reads a template's spec, and sets defaults.
func ToTemplateSpec(g v1alpha1.SandboxTemplateSpec) (s sandbox.TemplateSpec, err error) {
	if len(g.Volumes) > 0 {
		return s, errors.New("volumes: this version has no volumes yet; leave the field out")
	}
	s = sandbox.TemplateSpec{
		Image: g.Image, Init: g.Init, Workdir: g.Workdir, User: g.User,
		MilliCPUs: sandbox.DefaultMilliCPUs, Memory: sandbox.DefaultMemory, Network: sandbox.NetworkMode(g.Network),
		TrustNamespaceCA: g.TrustNamespaceCA, BuildTimeout: toDuration(g.BuildTimeout),
	}
	if s.Env, err = toEnv(g.Env); err != nil {
		return s, err
	}
	if !g.Resources.CPU.IsZero() {
		s.MilliCPUs = uint64(max(0, g.Resources.CPU.MilliValue()))
	}
	if !g.Resources.Memory.IsZero() {
		if s.Memory, err = toBytes("resources.memory", g.Resources.Memory); err != nil {
			return s, err
		}
	}
	if !g.Resources.Disk.IsZero() {
		if s.Disk, err = toBytes("resources.disk", g.Resources.Disk); err != nil {
			return s, err
		}
	}
	if r := g.Ready; r != nil {
		if r.Port < 0 || r.Port > math.MaxUint16 {
			return s, fmt.Errorf("ready.port: %d is no port", r.Port)
		}
		s.Ready = &sandbox.ReadyCheck{Command: r.Command, Port: uint16(r.Port), Delay: toDuration(r.Delay), Timeout: toDuration(r.Timeout)}
	}
	if w := g.Warmup; w != nil {
		s.Warmup = &sandbox.Program{Language: w.Language, Text: w.Code}
		if w.Language == "" {
			s.Warmup.Language = "python"
		}
	}
	if s.NetworkPolicy, err = toPolicy("networkPolicy", g.NetworkPolicy); err != nil {
		return s, err
	}
	s.BuildNetwork, err = toPolicy("buildNetwork", g.BuildNetwork)
	return s, err
}

func fromPolicy(p *policy.Policy) *v1alpha1.NetworkPolicy {
	if p == nil {
		return nil
	}
	return &v1alpha1.NetworkPolicy{Egress: string(p.Egress), Allow: policy.Texts(p.Allow), Deny: policy.Texts(p.Deny)}
}

func toPolicy(field string, g *v1alpha1.NetworkPolicy) (*policy.Policy, error) {
	if g == nil {
		return nil, nil
	}
	return sandbox.ParseNetworkPolicy(field, g.Egress, g.Allow, g.Deny)
}

// FromPoolSpec converts a pool's spec.
func FromPoolSpec(s sandbox.PoolSpec) v1alpha1.SandboxPoolSpec {
	return v1alpha1.SandboxPoolSpec{
		TemplateRef: v1alpha1.Ref{Name: string(s.Template)}, Replicas: fromReplicas(s.Replicas), SnapshotAfter: string(s.Stage),
		MaxSurge: convert.Number[int32](s.MaxSurge), MaxUnavailable: convert.Number[int32](s.MaxUnavailable),
	}
}

// ToPoolSpec reads a pool's spec.
func ToPoolSpec(g v1alpha1.SandboxPoolSpec) (sandbox.PoolSpec, error) {
	template, err := sandbox.ParseName(g.TemplateRef.Name)
	if err != nil {
		return sandbox.PoolSpec{}, fmt.Errorf("templateRef: %w", err)
	}
	return sandbox.PoolSpec{
		Template: template, Replicas: toReplicas(g.Replicas), Stage: sandbox.Stage(g.SnapshotAfter),
		MaxSurge: convert.Number[int](g.MaxSurge), MaxUnavailable: convert.Number[int](g.MaxUnavailable),
	}, nil
}

// FromClaimSpec converts a claim's spec.
func FromClaimSpec(s sandbox.ClaimSpec) v1alpha1.SandboxClaimSpec {
	return v1alpha1.SandboxClaimSpec{
		PoolRef: v1alpha1.Ref{Name: string(s.Pool)}, Env: fromEnv(s.Env), Secrets: fromSecretRefs(s.Secrets), Metadata: s.Metadata,
		Timeout: fromDuration(s.Timeout), IdleTimeout: fromDuration(s.IdleTimeout), OnTimeout: string(s.OnTimeout),
		NetworkPolicy: fromPolicy(s.NetworkPolicy),
	}
}

// ToClaimSpec reads a claim's spec.
func ToClaimSpec(g v1alpha1.SandboxClaimSpec) (s sandbox.ClaimSpec, err error) {
	pool, err := sandbox.ParseName(g.PoolRef.Name)
	if err != nil {
		return s, fmt.Errorf("poolRef: %w", err)
	}
	s = sandbox.ClaimSpec{Pool: pool, Metadata: g.Metadata, Lifetime: sandbox.Lifetime{
		Timeout: toDuration(g.Timeout), IdleTimeout: toDuration(g.IdleTimeout), OnTimeout: sandbox.TimeoutAction(g.OnTimeout),
	}}
	if s.Env, err = toEnv(g.Env); err != nil {
		return s, err
	}
	if s.Secrets, err = toSecretRefs(g.Secrets); err != nil {
		return s, err
	}
	s.NetworkPolicy, err = toPolicy("networkPolicy", g.NetworkPolicy)
	return s, err
}

// FromForkSpec converts a fork's spec.
func FromForkSpec(s sandbox.ForkSpec) v1alpha1.SandboxForkSpec {
	return v1alpha1.SandboxForkSpec{
		SourceRef: v1alpha1.Ref{Name: string(s.Source)}, Replicas: fromReplicas(s.Replicas), NetworkPolicy: fromPolicy(s.NetworkPolicy),
	}
}

// ToForkSpec reads a fork's spec.
func ToForkSpec(g v1alpha1.SandboxForkSpec) (s sandbox.ForkSpec, err error) {
	if g.AllowSecretInheritance {
		return s, errors.New("allowSecretInheritance: who supplied the secrets forks a sandbox that holds them, nobody else; leave the field out")
	}
	source, err := sandbox.ParseName(g.SourceRef.Name)
	if err != nil {
		return s, fmt.Errorf("sourceRef: %w", err)
	}
	s = sandbox.ForkSpec{Source: source, Replicas: toReplicas(g.Replicas)}
	s.NetworkPolicy, err = toPolicy("networkPolicy", g.NetworkPolicy)
	return s, err
}

func fromSecretRefs(refs []sandbox.SecretRef) (out []v1alpha1.Secret) {
	for _, r := range refs {
		out = append(out, v1alpha1.Secret{Name: string(r.Secret), Key: r.Key, Env: r.Env, Inject: (*v1alpha1.Inject)(r.Inject)})
	}
	return out
}

func toSecretRefs(list []v1alpha1.Secret) (out []sandbox.SecretRef, err error) {
	entries := map[string]bool{}
	for i, s := range list {
		ref := sandbox.SecretRef{Key: s.Key, Env: s.Env, Inject: (*sandbox.Inject)(s.Inject)}
		of := s.Name
		if r := s.SecretRef; r != nil {
			if s.Key != "" {
				return nil, fmt.Errorf("secrets[%d]: key is there twice, once in secretRef", i)
			}
			if s.Name != "" && entries[s.Name] {
				return nil, fmt.Errorf("secrets[%d]: the name %.80q is there twice", i, s.Name)
			}
			entries[s.Name] = true
			of, ref.Key = r.Name, r.Key
		}
		if ref.Key == "" {
			return nil, fmt.Errorf("secrets[%d]: key is missing: which value of the secret", i)
		}
		if ref.Secret, err = sandbox.ParseName(of); err != nil {
			return nil, fmt.Errorf("secrets[%d]: %w", i, err)
		}
		out = append(out, ref)
	}
	return out, nil
}

func fromReplicas(n int) *int32 {
	out := int32(n)
	return &out
}

func toReplicas(n *int32) int {
	if n == nil {
		return 1
	}
	return int(*n)
}

func fromDuration(d time.Duration) *metav1.Duration {
	if d == 0 {
		return nil
	}
	return &metav1.Duration{Duration: d}
}

func toDuration(d *metav1.Duration) time.Duration {
	if d == nil {
		return 0
	}
	return d.Duration
}

func fromEnv(env sandbox.Env) (out []v1alpha1.EnvVar) {
	for _, name := range slices.Sorted(maps.Keys(env)) {
		out = append(out, v1alpha1.EnvVar{Name: name, Value: env[name]})
	}
	return out
}

func toEnv(vars []v1alpha1.EnvVar) (sandbox.Env, error) {
	if len(vars) == 0 {
		return nil, nil
	}
	out := sandbox.Env{}
	for _, v := range vars {
		if _, twice := out[v.Name]; twice {
			return nil, fmt.Errorf("env: %s is there twice", v.Name)
		}
		out[v.Name] = v.Value
	}
	return out, nil
}

func fromBytes(n uint64) resource.Quantity {
	if n == 0 {
		return resource.Quantity{}
	}
	return *resource.NewQuantity(int64(n), resource.BinarySI)
}

func toBytes(field string, q resource.Quantity) (uint64, error) {
	n, exact := q.AsInt64()
	if !exact || n < 0 {
		return 0, fmt.Errorf("%s: %s is no number of bytes", field, q.String())
	}
	return uint64(n), nil
}
