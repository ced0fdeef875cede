package node

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

// ApplySecret makes a secret or replaces all of its values. Claimed sandboxes keep the
// values that they have inside; their requests get the new value.
func (m *Manager) ApplySecret(ctx context.Context, k sandbox.Key, data sandbox.SecretData) (sandbox.Secret, error) {
	return m.putSecret(ctx, k, data, true)
}

// SetSecret sets some values of a secret, and makes the secret if it does not
// exist.
func (m *Manager) SetSecret(ctx context.Context, k sandbox.Key, data sandbox.SecretData) (sandbox.Secret, error) {
	return m.putSecret(ctx, k, data, false)
}

func (m *Manager) putSecret(ctx context.Context, k sandbox.Key, data sandbox.SecretData, replace bool) (sandbox.Secret, error) {
	if err := m.beginMaking(); err != nil {
		return sandbox.Secret{}, err
	}
	return m.changeSecret(ctx, k, func(old *secretRecord) (*secretRecord, error) {
		now := time.Now().UTC()
		next := &secretRecord{Namespace: k.Namespace, Name: k.Name, Created: now, Changed: now, Data: map[string][]byte{}}
		if old != nil {
			next.Created = old.Created
			if !replace {
				maps.Copy(next.Data, old.Data)
			}
		}
		maps.Copy(next.Data, data)
		return next, sandbox.SecretData(next.Data).Validate()
	})
}

// DeleteSecret deletes a secret. Claimed sandboxes keep the values that they have inside;
// requests that ask for the secret are refused.
func (m *Manager) DeleteSecret(ctx context.Context, k sandbox.Key) error {
	if err := m.begin(); err != nil {
		return err
	}
	_, err := m.changeSecret(ctx, k, func(old *secretRecord) (*secretRecord, error) {
		if old == nil {
			return nil, sandbox.NotFound(sandbox.KindSecret, k)
		}
		return nil, nil
	})
	return err
}

// Secret returns the public part of a secret.
func (m *Manager) Secret(_ context.Context, k sandbox.Key) (sandbox.Secret, error) {
	r := m.secrets.get(k)
	if r == nil {
		return sandbox.Secret{}, sandbox.NotFound(sandbox.KindSecret, k)
	}
	return r.public(), nil
}

// Secrets lists secrets by name.
func (m *Manager) Secrets(_ context.Context, n sandbox.Namespace, p sandbox.Page) (out []sandbox.Secret, _ error) {
	for _, r := range m.secrets.all() {
		if r.Namespace == n && string(r.Name) > p.After {
			out = append(out, r.public())
		}
	}
	slices.SortFunc(out, func(a, b sandbox.Secret) int { return strings.Compare(string(a.Name), string(b.Name)) })
	return out[:min(len(out), p.Most())], nil
}

// secretEnv returns the variables for a claim's references to secrets.
func (m *Manager) secretEnv(n sandbox.Namespace, refs []sandbox.SecretRef) (sandbox.Env, error) {
	if len(refs) == 0 {
		return nil, nil
	}
	env := sandbox.Env{}
	for _, r := range refs {
		value, err := m.secretValue(n, r)
		if err != nil {
			return nil, err
		}
		if r.Inject != nil {
			value = r.Placeholder()
		}
		env[r.Variable()] = value
	}
	return env, nil
}

// claimSecrets returns the variables for all of a claim's secrets: those that it refers to,
// and those that came with it.
func (m *Manager) claimSecrets(r sandbox.ClaimRequest) (sandbox.Env, error) {
	env, err := m.secretEnv(r.Namespace, r.Spec.Secrets)
	if err != nil || len(r.Values) == 0 {
		return env, err
	}
	if m.cfg.Key == nil { // snapshots could not be sealed
		return nil, sandbox.Errorf(sandbox.CodeUnimplemented, "this daemon takes no secrets").Because("it has no key for them")
	}
	given := make(sandbox.Env, len(r.Values))
	for name, value := range r.Values {
		given[name] = string(value)
	}
	return merge(env, given), nil
}

// secretValue returns the value that a reference names.
func (m *Manager) secretValue(n sandbox.Namespace, r sandbox.SecretRef) (string, error) {
	k := sandbox.Key{Namespace: n, Name: r.Secret}
	have := m.secrets.get(k)
	if have == nil {
		return "", sandbox.NotFound(sandbox.KindSecret, k).Because("the claim asks for its key %s", r.Key)
	}
	value, ok := have.Data[r.Key]
	if !ok {
		return "", sandbox.Errorf(sandbox.CodeNotFound, "secret %s has no key %s in namespace %s", r.Secret, r.Key, n).
			Try("`agentrun secret list -n %s` lists what there is", n)
	}
	return string(value), nil
}

// sealing returns the options with which images of a sandbox are written.
func (m *Manager) sealing(s sandbox.Sandbox) []snapshot.Option {
	if !s.HoldsSecrets() {
		return nil
	}
	return []snapshot.Option{snapshot.Sealed(m.cfg.Key)}
}

// mayCopy refuses principals that have not supplied the secrets that a sandbox
// holds, because its forks, its checkpoints and sandboxes restored from them hold
// the secrets too. It logs both outcomes. what is the verb in its messages.
func (m *Manager) mayCopy(ctx context.Context, s sandbox.Sandbox, what string) error {
	if !s.HoldsSecrets() {
		return nil
	}
	who := sandbox.PrincipalOf(ctx)
	allowed := who != "" && who == s.SecretsBy
	m.cfg.Log.Warn("copy of a sandbox that holds secrets", "verb", what, "namespace", s.Namespace, "sandbox", s.Name, "id", s.ID,
		"holdsSecrets", true, "principal", string(who), "secretsBy", string(s.SecretsBy), "allowed", allowed)
	if allowed {
		return nil
	}
	return sandbox.Errorf(sandbox.CodeDenied, "%s of sandbox %s is not for %s", what, s.Name, who.Shown()).
		Because("it holds secrets that %s has supplied", s.SecretsBy.Shown()).
		Try("Do it as %s, or claim a sandbox with secrets of your own", s.SecretsBy.Shown())
}
