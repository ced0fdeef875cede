package nodeconv

import (
	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert"
	"agentrun.dev/internal/sandbox"
)

// FromSecret shows what anybody may know of a secret.
func FromSecret(s sandbox.Secret) *nodev1.Secret {
	return &nodev1.Secret{Namespace: string(s.Namespace), Name: string(s.Name), Keys: s.Keys, Created: fromTime(s.Created), Changed: fromTime(s.Changed)}
}

// ToSecret reads the public part of a secret.
func ToSecret(g *nodev1.Secret) (sandbox.Secret, error) {
	var r convert.Reader
	return sandbox.Secret{Key: r.Key(g.GetNamespace(), g.GetName()), Keys: g.GetKeys(), Created: toTime(g.GetCreated()), Changed: toTime(g.GetChanged())}, r.Err()
}

// FromSecretData is for ApplySecret. The caller adds namespace and name.
func FromSecretData(d sandbox.SecretData) *nodev1.ApplySecretRequest {
	return &nodev1.ApplySecretRequest{Data: d}
}

// ToSecretData reads the values of a secret.
func ToSecretData(g interface{ GetData() map[string][]byte }) sandbox.SecretData { return g.GetData() }

func fromSecretRefs(refs []sandbox.SecretRef) (out []*nodev1.SecretRef) {
	for _, r := range refs {
		g := &nodev1.SecretRef{Secret: string(r.Secret), Key: r.Key, Env: r.Env}
		if i := r.Inject; i != nil {
			g.Inject = &nodev1.Inject{Host: i.Host, Header: i.Header, Format: i.Format}
		}
		out = append(out, g)
	}
	return out
}

func toSecretRefs(r *convert.Reader, given []*nodev1.SecretRef) (out []sandbox.SecretRef) {
	for _, g := range given {
		ref := sandbox.SecretRef{Secret: r.Name(g.GetSecret()), Key: g.GetKey(), Env: g.GetEnv()}
		if i := g.GetInject(); i != nil {
			ref.Inject = &sandbox.Inject{Host: i.GetHost(), Header: i.GetHeader(), Format: i.GetFormat()}
		}
		out = append(out, ref)
	}
	return out
}

// FromQuota is for SetQuota.
func FromQuota(q sandbox.Quota) *nodev1.SetQuotaRequest {
	return &nodev1.SetQuotaRequest{Namespace: string(q.Namespace), MemoryBytes: q.Memory, Sandboxes: int64(q.Sandboxes), StorageBytes: q.Storage}
}

// ToQuota reads what a namespace may use.
func ToQuota(g *nodev1.SetQuotaRequest) (sandbox.Quota, error) {
	var r convert.Reader
	return sandbox.Quota{Namespace: r.Namespace(g.GetNamespace()), Memory: g.GetMemoryBytes(), Sandboxes: int(g.GetSandboxes()), Storage: g.GetStorageBytes()}, r.Err()
}

// FromQuotaUse shows what a namespace uses.
func FromQuotaUse(q sandbox.QuotaUse) *nodev1.Quota {
	return &nodev1.Quota{
		Namespace: string(q.Namespace), MemoryBytes: q.Memory, Sandboxes: int64(q.Sandboxes), StorageBytes: q.Storage,
		UsedMemoryBytes: q.UsedMemory, UsedSandboxes: int64(q.UsedSandboxes), UsedStorageBytes: q.UsedStorage,
	}
}

// ToQuotaUse reads what a namespace uses.
func ToQuotaUse(g *nodev1.Quota) (sandbox.QuotaUse, error) {
	var r convert.Reader
	return sandbox.QuotaUse{
		Quota:      sandbox.Quota{Namespace: r.Namespace(g.GetNamespace()), Memory: g.GetMemoryBytes(), Sandboxes: int(g.GetSandboxes()), Storage: g.GetStorageBytes()},
		UsedMemory: g.GetUsedMemoryBytes(), UsedSandboxes: int(g.GetUsedSandboxes()), UsedStorage: g.GetUsedStorageBytes(),
	}, r.Err()
}

// FromOnce is for calls that can have the identity of a request; nil means that a
// request has no identity.
func FromOnce(o *sandbox.Once) *nodev1.RequestIdentity {
	if o == nil {
		return nil
	}
	return &nodev1.RequestIdentity{Key: o.Key, Body: o.Body}
}

// ToOnce reads the identity of a request.
func ToOnce(g *nodev1.RequestIdentity) (*sandbox.Once, error) {
	if g == nil {
		return nil, nil
	}
	o, err := sandbox.ParseOnce(g.GetKey(), g.GetBody())
	return &o, err
}

// FromBuildLogRequest is for GetTemplateLog.
func FromBuildLogRequest(r sandbox.BuildLogRequest) *nodev1.GetTemplateLogRequest {
	return &nodev1.GetTemplateLogRequest{
		Namespace: string(r.Namespace), Name: string(r.Name), Stage: stages[r.Stage], Follow: r.Follow, Offset: r.Offset, Tail: convert.Number[int32](r.Tail),
	}
}

// ToBuildLogRequest reads which part of a log is asked for.
func ToBuildLogRequest(g *nodev1.GetTemplateLogRequest) (sandbox.BuildLogRequest, error) {
	var r convert.Reader
	out := sandbox.BuildLogRequest{
		Key: r.Key(g.GetNamespace(), g.GetName()), Stage: sandbox.AfterReady, Follow: g.GetFollow(), Offset: g.GetOffset(), Tail: convert.Number[int](g.Tail),
	}
	if g.GetStage() != nodev1.Stage_STAGE_UNSPECIFIED {
		out.Stage = inverse(stages, g.GetStage())
	}
	return out, r.Err()
}

// FromToken is for WatchToken.
func FromToken(t sandbox.Token) *nodev1.WatchTokenRequest {
	if t.Derived != "" {
		return &nodev1.WatchTokenRequest{Token: &nodev1.WatchTokenRequest_Derived{Derived: string(t.Derived)}}
	}
	return &nodev1.WatchTokenRequest{Token: &nodev1.WatchTokenRequest_TokenSha256{TokenSha256: string(t.Hash)}}
}

// ToToken reads which token is asked about.
func ToToken(g *nodev1.WatchTokenRequest) (sandbox.Token, error) {
	var r convert.Reader
	t := sandbox.Token{Derived: r.OptionalID(g.GetDerived()), Hash: r.OptionalTokenHash(g.GetTokenSha256())}
	if t == (sandbox.Token{}) {
		r.Fail(sandbox.Invalid("token", "either derived or token_sha256 must be there"))
	}
	return t, r.Err()
}
