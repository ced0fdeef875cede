// Package pick chooses and opens engines by name.
package pick

import (
	"fmt"
	"strings"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/gvisor"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/host/doctor"
	"agentrun.dev/internal/storage/seal"
)

// Kind is an engine by its name on the command line.
type Kind string

// The engines. Auto leaves the choice to the host.
const (
	Auto    Kind = "auto"
	MicroVM Kind = "microvm"
	GVisor  Kind = "gvisor"
)

// Kinds lists the engines.
var Kinds = []Kind{MicroVM, GVisor}

// String makes a Kind a flag.
func (k *Kind) String() string { return string(*k) }

// Type is the name of the flag's type in help texts.
func (k *Kind) Type() string { return "engine" }

// Set parses a name.
func (k *Kind) Set(s string) error {
	switch kind := Kind(s); kind {
	case Auto, MicroVM, GVisor:
		*k = kind
		return nil
	}
	return fmt.Errorf("%q is no engine: %s, %s or %s", s, Auto, MicroVM, GVisor)
}

// Of is the kind of engine that a snapshot names.
func Of(name string) (Kind, error) {
	switch name {
	case microvm.Name:
		return MicroVM, nil
	case gvisor.Name:
		return GVisor, nil
	}
	return "", fmt.Errorf("no engine is called %.80q", name)
}

// Choose resolves Auto: microVMs on hardware KVM, gVisor elsewhere. why is the reason
// in one sentence.
func Choose(k Kind) (_ Kind, why string) {
	if k != Auto {
		return k, "it was asked for"
	}
	hardware, detail := doctor.HardwareKVM()
	if hardware {
		return MicroVM, "KVM: " + detail
	}
	return GVisor, "KVM is not hardware's: " + detail
}

// Config is the configuration of all engines.
type Config struct {
	// Resident is a folder on tmpfs. Scratch is a folder on a disk.
	Resident, Scratch string
	// Helpers is a folder on a disk for the builds of gvisor-helper that have made
	// snapshots and sandboxes. If it is empty, no builds are kept.
	Helpers string
	Jail    microvm.JailPolicy
	// Precreate is how many sandboxes gVisor makes ahead.
	Precreate int
	// Key opens the private snapshots that adopted sandboxes come from. With nil the
	// engine cannot open private snapshots.
	Key *seal.Key
}

// Open opens an engine. k must not be Auto.
func Open(k Kind, cfg Config) (engine.Engine, error) {
	switch k {
	case MicroVM:
		return microvm.New(microvm.Config{Resident: cfg.Resident, Scratch: cfg.Scratch, Jail: cfg.Jail, Key: cfg.Key})
	case GVisor:
		return gvisor.New(gvisor.Config{
			Resident: cfg.Resident, Helpers: cfg.Helpers, Precreate: cfg.Precreate, Key: cfg.Key,
			AllowUnlimited: cfg.Jail.AllowUnlimited || cfg.Jail.AllowUnjailed,
		})
	}
	return nil, fmt.Errorf("engine %q: choose one of %s", k, strings.Join([]string{string(MicroVM), string(GVisor)}, ", "))
}
