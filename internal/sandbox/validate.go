package sandbox

import (
	"errors"
	"fmt"
	"path"
	"regexp"
	"strings"
	"time"
)

const mib = 1 << 20

// Mebibytes shows a size, rounded up.
func Mebibytes(n uint64) string { return fmt.Sprintf("%d MiB", (n+mib-1)/mib) }

// Bounds of a template.
const (
	MinMemory    = 64 * mib // a Linux guest needs this to boot
	maxMemory    = 1 << 40
	MinDisk      = 16 * mib
	maxDisk      = 16 << 40 // the limit of an engine's disk
	maxMilliCPUs = 256_000
	maxInit      = 100
	maxText      = 1 << 20

	maxBuildTimeout = 24 * time.Hour
)

// Defaults.
const (
	DefaultMilliCPUs = 1000
	DefaultMemory    = 512 * mib
	DefaultWorkdir   = "/workspace"
	DefaultReady     = time.Minute

	DefaultBuildTimeout = 30 * time.Minute
)

// Invalid is the error for an invalid field of a request.
func Invalid(field, format string, args ...any) error {
	return Errorf(CodeInvalid, "%s: %s", field, fmt.Sprintf(format, args...))
}

// Validate refuses a template that no node can build.
func (s TemplateSpec) Validate() error {
	switch {
	case s.Image == "":
		return Invalid("image", "a template needs one")
	case s.MilliCPUs == 0 || s.MilliCPUs > maxMilliCPUs:
		return Invalid("resources.cpu", "%d thousandths of a processor are not between 1 and %d", s.MilliCPUs, maxMilliCPUs)
	case s.Memory < MinMemory || s.Memory > maxMemory:
		return Invalid("resources.memory", "%s are not between %s and %s", Mebibytes(s.Memory), Mebibytes(MinMemory), Mebibytes(maxMemory))
	case s.Disk > 0 && (s.Disk < MinDisk || s.Disk > maxDisk):
		return InvalidDisk(s.Disk, maxDisk, "")
	case len(s.Init) > maxInit:
		return Invalid("init", "%d commands are more than %d", len(s.Init), maxInit)
	case s.BuildTimeout < 0 || s.BuildTimeout > maxBuildTimeout:
		return Invalid("buildTimeout", "%v is not between 0, for the default of %v, and %v", s.BuildTimeout, DefaultBuildTimeout, maxBuildTimeout)
	case s.Workdir != "" && !path.IsAbs(s.Workdir):
		return Invalid("workdir", "%s is not absolute", Quote(s.Workdir))
	}
	for i, c := range s.Init {
		if strings.TrimSpace(c) == "" || len(c) > maxText || strings.ContainsRune(c, 0) {
			return Invalid(fmt.Sprintf("init[%d]", i), "a command is text of at most %d bytes, not empty and without NUL", maxText)
		}
	}
	if err := s.Env.Validate(); err != nil {
		return err
	}
	if s.Warmup != nil && (s.Warmup.Language == "" || len(s.Warmup.Text) > maxText) {
		return Invalid("warmup", "it needs a language and at most %d bytes of code", maxText)
	}
	if err := s.validateNetwork(); err != nil {
		return err
	}
	return s.Ready.validate()
}

func (r *ReadyCheck) validate() error {
	if r == nil {
		return nil
	}
	set := 0
	for _, is := range []bool{r.Command != "", r.Port != 0, r.Delay != 0} {
		if is {
			set++
		}
	}
	if set != 1 {
		return Invalid("ready", "it has one of command, port and delay, not %d of them", set)
	}
	if r.Delay < 0 || r.Timeout < 0 {
		return Invalid("ready", "a time is negative")
	}
	return nil
}

// InvalidDisk is the error for the size of a disk. It names the possible sizes.
func InvalidDisk(size, most uint64, why string) error {
	if why != "" {
		why = ": " + why
	}
	given := Mebibytes(size)
	if size%mib != 0 { // rounded, an invalid size might look valid
		given = fmt.Sprintf("%d bytes", size)
	}
	return Invalid("resources.disk", "%s are not between %s and %s%s", given, Mebibytes(MinDisk), Mebibytes(most/mib*mib), why)
}

var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// Validate refuses names and values that no process can be given.
func (e Env) Validate() error {
	for name, value := range e {
		if !envName.MatchString(name) {
			return Invalid("env", "%s is not a name of letters, digits and underscores", Quote(name))
		}
		if strings.ContainsRune(value, 0) {
			return Invalid("env", "the value of %s has a NUL", name)
		}
	}
	return nil
}

// CheckSize refuses an environment that is too large for the agent.
func (e Env) CheckSize() error {
	size := 0
	for name, value := range e {
		size += len(name) + len(value) + 8
	}
	if size > maxEnvironment {
		return Invalid("env", "all variables together, secrets included, have %d bytes, more than %d", size, maxEnvironment)
	}
	return nil
}

// Validate refuses a pool that no node can keep.
func (p PoolSpec) Validate() error {
	switch {
	case p.Template == "":
		return Invalid("templateRef", "a pool needs a template")
	case p.Replicas < 0 || p.Replicas > maxReplicas:
		return Invalid("replicas", "%d is not between 0 and %d", p.Replicas, maxReplicas)
	case p.Stage != AfterInit && p.Stage != AfterReady:
		return Invalid("snapshotAfter", "%s is neither %s nor %s", Quote(string(p.Stage)), AfterInit, AfterReady)
	}
	surge, unavailable := p.Rollout()
	switch {
	case surge < 0 || surge > maxReplicas:
		return Invalid("maxSurge", "%d is not between 0 and %d", surge, maxReplicas)
	case unavailable < 0 || unavailable > maxReplicas:
		return Invalid("maxUnavailable", "%d is not between 0 and %d", unavailable, maxReplicas)
	case surge == 0 && unavailable == 0:
		return Invalid("maxSurge", "it is 0, and so is maxUnavailable: a new revision would never be rolled out")
	}
	return nil
}

const maxReplicas = 10_000

// Bounds of a sandbox's metadata.
const (
	maxMetadata      = 64
	maxMetadataValue = 4096
)

// Validate refuses a claim that no pool can serve.
func (c ClaimSpec) Validate() error {
	if c.Pool == "" {
		return Invalid("poolRef", "a claim needs a pool")
	}
	if err := errors.Join(c.Env.Validate(), c.validateSecrets()); err != nil {
		return err
	}
	if err := validateMetadata(c.Metadata); err != nil {
		return err
	}
	if err := validatePolicy("networkPolicy", c.NetworkPolicy); err != nil {
		return err
	}
	return c.Lifetime.Validate()
}

// MaxFork is the greatest number of children of a fork.
const MaxFork = 1000

// Validate refuses a fork that no sandbox can have.
func (f ForkSpec) Validate() error {
	if f.Replicas < 1 || f.Replicas > MaxFork {
		return Invalid("replicas", "%d is not between 1 and %d", f.Replicas, MaxFork)
	}
	return validatePolicy("networkPolicy", f.NetworkPolicy)
}

func validateMetadata(entries map[string]string) error {
	if len(entries) > maxMetadata {
		return Invalid("metadata", "%d entries are more than %d", len(entries), maxMetadata)
	}
	for k, v := range entries {
		if k == "" || len(k) > maxMetadataValue || len(v) > maxMetadataValue {
			return Invalid("metadata", "keys and values have 1 to %d bytes", maxMetadataValue)
		}
	}
	return nil
}

// Validate refuses times that are negative and actions that do not exist.
func (l Lifetime) Validate() error {
	if l.Timeout < 0 || l.IdleTimeout < 0 {
		return Invalid("timeout", "it is negative")
	}
	switch l.OnTimeout {
	case "", TimeoutKill, TimeoutPause, TimeoutHibernate:
		return nil
	}
	return Invalid("onTimeout", "%s is none of kill, pause and hibernate", Quote(string(l.OnTimeout)))
}
