package sandbox

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"agentrun.dev/internal/storage/snapshot"
)

// Secret is what anybody may know of a secret: never a value.
type Secret struct {
	Key
	// Keys are the names of its values, sorted.
	Keys    []string
	Created time.Time
	Changed time.Time
}

// SecretData is the values of a secret by key. Formatting it never shows one.
type SecretData map[string][]byte

// String tells nothing of the values.
func (d SecretData) String() string { return "SecretData{…}" }

// GoString is what %#v prints.
func (d SecretData) GoString() string { return d.String() }

// LogValue is what a log gets.
func (d SecretData) LogValue() slog.Value { return slog.StringValue(d.String()) }

// MarshalJSON refuses: only what is sealed is written, and nothing is answered.
func (d SecretData) MarshalJSON() ([]byte, error) {
	return nil, errors.New("the values of a secret are not written as JSON")
}

// SecretRef is one value of a secret that a sandbox has in its environment. It
// is all that the journal knows of it.
type SecretRef struct {
	Secret Name   `json:"secret"`
	Key    string `json:"key"`
	// Env is the variable; empty is Key.
	Env string `json:"env,omitempty"`
}

// Variable is the name of the environment variable.
func (r SecretRef) Variable() string {
	if r.Env != "" {
		return r.Env
	}
	return r.Key
}

// Bounds of secrets: all that a sandbox has must fit into one message to its
// agent.
const (
	maxSecretKeys  = 64
	maxSecretValue = 32 << 10
	maxSecretRefs  = 64
	maxEnvironment = 56 << 10
)

var secretKey = regexp.MustCompile(`^[-._a-zA-Z0-9]{1,253}$`)

func (d SecretData) validate() error {
	if len(d) == 0 || len(d) > maxSecretKeys {
		return invalid("data", "a secret has 1 to %d keys, not %d", maxSecretKeys, len(d))
	}
	for _, key := range slices.Sorted(maps.Keys(d)) {
		value := d[key]
		switch {
		case !secretKey.MatchString(key):
			return invalid("data", "the key %s is not 1 to 253 letters, digits, dashes, underscores and dots", quote(key))
		case len(value) > maxSecretValue:
			return invalid("data", "the value of %s has %d bytes, more than %d", key, len(value), maxSecretValue)
		case slices.Contains(value, 0):
			return invalid("data", "the value of %s has a NUL: no environment variable can hold it", key)
		}
	}
	return nil
}

// validateSecrets checks what a claim refers to, beside its plain variables.
func (c ClaimSpec) validateSecrets() error {
	if len(c.Secrets) > maxSecretRefs {
		return invalid("secrets", "%d are more than %d", len(c.Secrets), maxSecretRefs)
	}
	seen := map[string]bool{}
	for _, r := range c.Secrets {
		if _, err := ParseName(string(r.Secret)); err != nil {
			return invalid("secrets", "%v", err)
		}
		if !secretKey.MatchString(r.Key) {
			return invalid("secrets", "the key %s is not 1 to 253 letters, digits, dashes, underscores and dots", quote(r.Key))
		}
		name := r.Variable()
		if !envName.MatchString(name) {
			return invalid("secrets", "%s of %s is no name for an environment variable: give one with env", quote(name), r.Secret)
		}
		_, plain := c.Env[name]
		if seen[name] || plain {
			return invalid("secrets", "the variable %s is there twice: give another name with env", name)
		}
		seen[name] = true
	}
	return nil
}

// ApplySecret makes a secret or replaces all of its values. Sandboxes that were
// claimed keep what they have.
func (m *Manager) ApplySecret(k Key, data SecretData) (Secret, error) {
	return m.putSecret(k, data, true)
}

// SetSecret sets some values of a secret, and makes it if it is not there.
func (m *Manager) SetSecret(k Key, data SecretData) (Secret, error) {
	return m.putSecret(k, data, false)
}

func (m *Manager) putSecret(k Key, data SecretData, replace bool) (Secret, error) {
	if err := m.begin(); err != nil {
		return Secret{}, err
	}
	return m.secrets.change(k, func(old *secretRecord) (*secretRecord, error) {
		now := time.Now().UTC()
		next := &secretRecord{Namespace: k.Namespace, Name: k.Name, Created: now, Changed: now, Data: map[string][]byte{}}
		if old != nil {
			next.Created = old.Created
			if !replace {
				maps.Copy(next.Data, old.Data)
			}
		}
		maps.Copy(next.Data, data)
		return next, SecretData(next.Data).validate()
	})
}

// DeleteSecret deletes a secret. Sandboxes that were claimed keep what they have.
func (m *Manager) DeleteSecret(k Key) error {
	if err := m.begin(); err != nil {
		return err
	}
	_, err := m.secrets.change(k, func(old *secretRecord) (*secretRecord, error) {
		if old == nil {
			return nil, notFound(KindSecret, k)
		}
		return nil, nil
	})
	return err
}

// Secret returns what may be known of a secret.
func (m *Manager) Secret(k Key) (Secret, error) {
	r := m.secrets.get(k)
	if r == nil {
		return Secret{}, notFound(KindSecret, k)
	}
	return r.public(), nil
}

// Secrets lists secrets by name.
func (m *Manager) Secrets(n Namespace, p Page) (out []Secret, _ error) {
	for _, r := range m.secrets.all() {
		if r.Namespace == n && string(r.Name) > p.After {
			out = append(out, r.public())
		}
	}
	slices.SortFunc(out, func(a, b Secret) int { return strings.Compare(string(a.Name), string(b.Name)) })
	return out[:min(len(out), p.limit())], nil
}

// secretEnv is the variables that a claim's references stand for.
func (m *Manager) secretEnv(n Namespace, refs []SecretRef) (Env, error) {
	if len(refs) == 0 {
		return nil, nil
	}
	env := Env{}
	for _, r := range refs {
		k := Key{n, r.Secret}
		have := m.secrets.get(k)
		if have == nil {
			return nil, notFound(KindSecret, k).Because("the claim asks for its key %s", r.Key)
		}
		value, ok := have.Data[r.Key]
		if !ok {
			return nil, Errorf(CodeNotFound, "secret %s has no key %s in namespace %s", r.Secret, r.Key, n).
				Try("`agentrun secret list -n %s` lists what there is", n)
		}
		env[r.Variable()] = string(value)
	}
	return env, nil
}

// checkSize refuses an environment that no agent would take, by its size alone.
func (e Env) checkSize() error {
	size := 0
	for name, value := range e {
		size += len(name) + len(value) + 8
	}
	if size > maxEnvironment {
		return invalid("env", "all variables together, secrets included, have %d bytes, more than %d", size, maxEnvironment)
	}
	return nil
}

// holdsSecrets reports whether its memory has secrets in it.
func (s Sandbox) holdsSecrets() bool { return len(s.Secrets) > 0 }

// sealing is how images of a sandbox are written.
func (m *Manager) sealing(s Sandbox) []snapshot.Option {
	if !s.holdsSecrets() {
		return nil
	}
	return []snapshot.Option{snapshot.Sealed(m.cfg.Key)}
}

// mayCopy refuses whoever has not supplied the secrets that a sandbox holds: its
// forks, its checkpoints and what is restored from them hold them too. What is done
// is written down either way; what is the verb.
func (m *Manager) mayCopy(ctx context.Context, s Sandbox, what string) error {
	if !s.holdsSecrets() {
		return nil
	}
	who := principalOf(ctx)
	allowed := who != "" && who == s.SecretsBy
	m.cfg.Log.Warn("copy of a sandbox that holds secrets", "verb", what, "namespace", s.Namespace, "sandbox", s.Name, "id", s.ID,
		"holdsSecrets", true, "principal", string(who), "secretsBy", string(s.SecretsBy), "allowed", allowed)
	if allowed {
		return nil
	}
	return Errorf(CodeDenied, "%s of sandbox %s is not for %s", what, s.Name, who.shown()).
		Because("it holds secrets that %s has supplied", s.SecretsBy.shown()).
		Try("Do it as %s, or claim a sandbox with secrets of your own", s.SecretsBy.shown())
}

// shown is a principal in an error.
func (p Principal) shown() string {
	if p == "" {
		return "somebody unknown"
	}
	return string(p)
}
