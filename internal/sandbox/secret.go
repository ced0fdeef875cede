package sandbox

import (
	"errors"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"time"
)

// Secret is the public part of a secret: never a value.
type Secret struct {
	Key
	// Keys are the names of its values, sorted.
	Keys    []string
	Created time.Time
	Changed time.Time
}

// SecretData is the values of a secret by key. Formatting it never shows one.
type SecretData map[string][]byte

// String never shows the values.
func (d SecretData) String() string { return "SecretData{…}" }

// GoString serves %#v.
func (d SecretData) GoString() string { return d.String() }

// LogValue serves logs.
func (d SecretData) LogValue() slog.Value { return slog.StringValue(d.String()) }

// MarshalJSON always fails: values are only stored sealed, and never part of an
// answer.
func (d SecretData) MarshalJSON() ([]byte, error) {
	return nil, errors.New("the values of a secret are not written as JSON")
}

// SecretRef refers to one value of a secret that a sandbox has in its
// environment. The journal keeps only this of the value.
type SecretRef struct {
	Secret Name   `json:"secret"`
	Key    string `json:"key"`
	// Env is the variable; it defaults to Key.
	Env string `json:"env,omitempty"`
	// Inject keeps the value outside of the sandbox, whose variable has Placeholder
	// instead. Nil puts the value into the variable.
	Inject *Inject `json:"inject,omitempty"`
}

// Variable is the name of the environment variable.
func (r SecretRef) Variable() string {
	if r.Env != "" {
		return r.Env
	}
	return r.Key
}

// Bounds of secrets: all secrets of a sandbox must fit into one message to its
// agent.
const (
	maxSecretKeys  = 64
	MaxSecretValue = 32 << 10
	MaxSecretRefs  = 64
	maxEnvironment = 56 << 10
)

var secretKey = regexp.MustCompile(`^[-._a-zA-Z0-9]{1,253}$`)

// Validate refuses keys and values that no environment can hold.
func (d SecretData) Validate() error {
	if len(d) == 0 || len(d) > maxSecretKeys {
		return Invalid("data", "a secret has 1 to %d keys, not %d", maxSecretKeys, len(d))
	}
	for _, key := range slices.Sorted(maps.Keys(d)) {
		value := d[key]
		switch {
		case !secretKey.MatchString(key):
			return Invalid("data", "the key %s is not 1 to 253 letters, digits, dashes, underscores and dots", Quote(key))
		case len(value) > MaxSecretValue:
			return Invalid("data", "the value of %s has %d bytes, more than %d", key, len(value), MaxSecretValue)
		case slices.Contains(value, 0):
			return Invalid("data", "the value of %s has a NUL: no environment variable can hold it", key)
		}
	}
	return nil
}

// validateSecrets checks the claim's references to secrets, also against its
// plain variables.
func (c ClaimSpec) validateSecrets() error {
	if len(c.Secrets) > MaxSecretRefs {
		return Invalid("secrets", "%d are more than %d", len(c.Secrets), MaxSecretRefs)
	}
	seen := map[string]bool{}
	for _, r := range c.Secrets {
		if _, err := ParseName(string(r.Secret)); err != nil {
			return Invalid("secrets", "%v", err)
		}
		if !secretKey.MatchString(r.Key) {
			return Invalid("secrets", "the key %s is not 1 to 253 letters, digits, dashes, underscores and dots", Quote(r.Key))
		}
		name := r.Variable()
		if !envName.MatchString(name) {
			return Invalid("secrets", "%s of %s is no name for an environment variable: give one with env", Quote(name), r.Secret)
		}
		_, plain := c.Env[name]
		if seen[name] || plain {
			return Invalid("secrets", "the variable %s is there twice: give another name with env", name)
		}
		seen[name] = true
		if err := r.Inject.Validate(); err != nil {
			return err
		}
	}
	return nil
}
