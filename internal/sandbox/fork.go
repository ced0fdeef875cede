package sandbox

import (
	"time"

	"agentrun.dev/internal/network/policy"
)

// ForkSpec is what a fork asks for.
type ForkSpec struct {
	Source   Name
	Replicas int
	// NetworkPolicy narrows the source's for the children; nil leaves it as it is.
	NetworkPolicy *policy.Policy
}

// ForkOutcome is what became of one child.
type ForkOutcome struct {
	Name    Name   `json:"name"`
	ID      ID     `json:"id,omitempty"`
	Problem string `json:"problem,omitempty"`
}

// Fork is a fork of a sandbox.
type Fork struct {
	Key
	Versioned
	Source   Name          `json:"source"`
	SourceID ID            `json:"sourceID"`
	Replicas int           `json:"replicas"`
	Created  time.Time     `json:"created"`
	Phase    Phase         `json:"phase"`
	Children []ForkOutcome `json:"children,omitempty"`
	// Pause is for how long the source stood still.
	Pause time.Duration `json:"pause,omitempty"`
	// By is who asked for it, HoldsSecrets whether the children have secrets.
	By           Principal `json:"by,omitempty"`
	HoldsSecrets bool      `json:"holdsSecrets,omitempty"`
}

// Identity is that of a fork, which has no id.
func (f Fork) Identity() Identity {
	return Identity{Kind: KindFork, Key: f.Key, Version: f.ResourceVersion}
}
