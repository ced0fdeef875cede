package sandbox

import (
	"errors"
	"fmt"
	"path"
	"regexp"
	"strings"
	"time"

	"agentrun.dev/internal/engine"
)

const mib = 1 << 20

func mebibytes(n uint64) string { return fmt.Sprintf("%d MiB", (n+mib-1)/mib) }

// Bounds of what a template may ask for.
const (
	MinMemory    = 64 * mib // what a Linux guest boots with
	maxMemory    = 1 << 40
	MinDisk      = engine.MinDisk
	maxDisk      = engine.LargestDisk
	maxMilliCPUs = 256_000
	maxInit      = 100
	maxText      = 1 << 20
)

// These are taken where nothing is said.
const (
	DefaultMilliCPUs = 1000
	DefaultMemory    = 512 * mib
	DefaultWorkdir   = "/workspace"
	DefaultReady     = time.Minute
)

func invalid(field, format string, args ...any) error {
	return Errorf(CodeInvalid, "%s: %s", field, fmt.Sprintf(format, args...))
}

func (s TemplateSpec) validate() error {
	switch {
	case s.Image == "":
		return invalid("image", "a template needs one")
	case s.MilliCPUs == 0 || s.MilliCPUs > maxMilliCPUs:
		return invalid("resources.cpu", "%d thousandths of a processor are not between 1 and %d", s.MilliCPUs, maxMilliCPUs)
	case s.Memory < MinMemory || s.Memory > maxMemory:
		return invalid("resources.memory", "%s are not between %s and %s", mebibytes(s.Memory), mebibytes(MinMemory), mebibytes(maxMemory))
	case s.Disk > 0 && (s.Disk < MinDisk || s.Disk > maxDisk):
		return invalidDisk(s.Disk, maxDisk, "")
	case len(s.Init) > maxInit:
		return invalid("init", "%d commands are more than %d", len(s.Init), maxInit)
	case s.Workdir != "" && !path.IsAbs(s.Workdir):
		return invalid("workdir", "%s is not absolute", quote(s.Workdir))
	}
	for i, c := range s.Init {
		if strings.TrimSpace(c) == "" || len(c) > maxText || strings.ContainsRune(c, 0) {
			return invalid(fmt.Sprintf("init[%d]", i), "a command is text of at most %d bytes, not empty and without NUL", maxText)
		}
	}
	if err := s.Env.validate(); err != nil {
		return err
	}
	if s.Warmup != nil && (s.Warmup.Language == "" || len(s.Warmup.Text) > maxText) {
		return invalid("warmup", "it needs a language and at most %d bytes of code", maxText)
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
		return invalid("ready", "it has one of command, port and delay, not %d of them", set)
	}
	if r.Delay < 0 || r.Timeout < 0 {
		return invalid("ready", "a time is negative")
	}
	return nil
}

var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

func (e Env) validate() error {
	for name, value := range e {
		if !envName.MatchString(name) {
			return invalid("env", "%s is not a name of letters, digits and underscores", quote(name))
		}
		if strings.ContainsRune(value, 0) {
			return invalid("env", "the value of %s has a NUL", name)
		}
	}
	return nil
}

func (p PoolSpec) validate() error {
	switch {
	case p.Template == "":
		return invalid("templateRef", "a pool needs a template")
	case p.Replicas < 0 || p.Replicas > maxReplicas:
		return invalid("replicas", "%d is not between 0 and %d", p.Replicas, maxReplicas)
	case p.Stage != AfterInit && p.Stage != AfterReady:
		return invalid("snapshotAfter", "%s is neither %s nor %s", quote(string(p.Stage)), AfterInit, AfterReady)
	}
	return nil
}

const maxReplicas = 10_000

// Bounds of a sandbox's metadata.
const (
	maxMetadata      = 64
	maxMetadataValue = 4096
)

func (c ClaimSpec) validate() error {
	if c.Pool == "" {
		return invalid("poolRef", "a claim needs a pool")
	}
	if err := errors.Join(c.Env.validate(), c.validateSecrets()); err != nil {
		return err
	}
	if err := validateMetadata(c.Metadata); err != nil {
		return err
	}
	return c.Lifetime.validate()
}

func validateMetadata(entries map[string]string) error {
	if len(entries) > maxMetadata {
		return invalid("metadata", "%d entries are more than %d", len(entries), maxMetadata)
	}
	for k, v := range entries {
		if k == "" || len(k) > maxMetadataValue || len(v) > maxMetadataValue {
			return invalid("metadata", "keys and values have 1 to %d bytes", maxMetadataValue)
		}
	}
	return nil
}

func (l Lifetime) validate() error {
	if l.Timeout < 0 || l.IdleTimeout < 0 {
		return invalid("timeout", "it is negative")
	}
	switch l.OnTimeout {
	case "", TimeoutKill, TimeoutPause, TimeoutHibernate:
		return nil
	}
	return invalid("onTimeout", "%s is none of kill, pause and hibernate", quote(string(l.OnTimeout)))
}
