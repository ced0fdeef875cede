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

// ApplySecret makes a secret or replaces all of its values. Sandboxes that were
// claimed keep what they have in them; what is put into their requests is the new value.
func (m *Manager) ApplySecret(ctx context.Context, k sandbox.Key, data sandbox.SecretData) (sandbox.Secret, error) {
	return m.putSecret(ctx, k, data, true)
}

// SetSecret sets some values of a secret, and makes it if it is not there.
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

// DeleteSecret deletes a secret. Sandboxes that were claimed keep what they have in them;
// requests that ask for it are refused.
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

// Secret returns what may be known of a secret.
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

// secretEnv is the variables that a claim's references stand for.
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

// claimSecrets is the variables that a claim's secrets become: those that it refers to, and
// those that came with it.
func (m *Manager) claimSecrets(r sandbox.ClaimRequest) (sandbox.Env, error) {
	env, err := m.secretEnv(r.Namespace, r.Spec.Secrets)
	if err != nil || len(r.Values) == 0 {
		return env, err
	}
	if m.cfg.Key == nil { // images could not be sealed
		return nil, sandbox.Errorf(sandbox.CodeUnimplemented, "this daemon takes no secrets").Because("it has no key for them")
	}
	given := make(sandbox.Env, len(r.Values))
	for name, value := range r.Values {
		given[name] = string(value)
	}
	return merge(env, given), nil
}

// secretValue is what a reference stands for.
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

// sealing is how images of a sandbox are written.
func (m *Manager) sealing(s sandbox.Sandbox) []snapshot.Option {
	if !s.HoldsSecrets() {
		return nil
	}
	return []snapshot.Option{snapshot.Sealed(m.cfg.Key)}
}

// mayCopy refuses whoever has not supplied the secrets that a sandbox holds: its
// forks, its checkpoints and what is restored from them hold them too. What is done
// is written down either way; what is the verb.
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
