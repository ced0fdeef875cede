package sandbox

import (
	"strconv"
	"time"

	"agentrun.dev/internal/network/policy"
)

// ForkSpec is the request of a fork.
type ForkSpec struct {
	Source   Name
	Replicas int
	// NetworkPolicy narrows the source's policy for the children; nil leaves it
	// unchanged.
	NetworkPolicy *policy.Policy
	// Children is empty, or has one entry for each child.
	Children []ForkChild
	// Atomic makes either all children or no child.
	Atomic bool
	// Checkpoint is the name of a checkpoint of the same instant; empty makes no
	// checkpoint.
	Checkpoint Name
}

// ForkChild is the request of one child.
type ForkChild struct {
	// Name defaults to <fork>-<number>.
	Name Name
	// Owner is the object of a controller that the child is for. Either all children have
	// owners or no child has. If they have, a repeated request is recognized by the fork's
	// name and the owners.
	Owner UID
	// Token is the hash of the child's token. If it is empty, the node makes a
	// token.
	Token TokenHash
}

// Child returns the request of a child by its number, counted from 0.
func (f ForkSpec) Child(fork Name, i int) (c ForkChild) {
	if i < len(f.Children) {
		c = f.Children[i]
	}
	if c.Name == "" {
		c.Name = Name(string(fork) + "-" + strconv.Itoa(i+1))
	}
	return c
}

// Owned reports whether the children have owners.
func (f ForkSpec) Owned() bool { return len(f.Children) > 0 && f.Children[0].Owner != "" }

// ValidateAs checks the children for a fork of this name.
func (f ForkSpec) ValidateAs(fork Name) error {
	if len(f.Children) != 0 && len(f.Children) != f.Replicas {
		return Invalid("children", "there are %d of them, and %d replicas", len(f.Children), f.Replicas)
	}
	names, owners, tokens := map[Name]bool{}, map[UID]bool{}, map[TokenHash]bool{}
	for i := range f.Replicas {
		c := f.Child(fork, i)
		if _, err := ParseName(string(c.Name)); err != nil {
			return err
		}
		switch {
		case names[c.Name]:
			return Invalid("children", "two of them have the name %s", c.Name)
		case (c.Owner != "") != f.Owned():
			return Invalid("children", "%s has an owner and another one has none, or the other way around", c.Name)
		case owners[c.Owner]:
			return Invalid("children", "two of them have the owner %s", c.Owner)
		case tokens[c.Token]:
			return Invalid("children", "two of them have the same token")
		}
		names[c.Name], owners[c.Owner], tokens[c.Token] = true, c.Owner != "", c.Token != ""
	}
	return nil
}

// ForkOutcome is the outcome of one child.
type ForkOutcome struct {
	Name    Name   `json:"name"`
	ID      ID     `json:"id,omitempty"`
	Problem string `json:"problem,omitempty"`
	Owner   UID    `json:"owner,omitempty"`
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
	// Pause is the time for which the source was paused.
	Pause time.Duration `json:"pause,omitempty"`
	// By is the principal of the request. HoldsSecrets says that the children
	// have secrets.
	By           Principal `json:"by,omitempty"`
	HoldsSecrets bool      `json:"holdsSecrets,omitempty"`
	// Checkpoint is of the same instant; it is empty if the fork made no
	// checkpoint.
	Checkpoint Name `json:"checkpoint,omitempty"`
	// Asked has a digest of each field that the request has set, if the children have
	// owners.
	Asked map[string]string `json:"asked,omitempty"`
}

// Identity returns that of a fork, which has no id.
func (f Fork) Identity() Identity {
	return Identity{Kind: KindFork, Key: f.Key, Version: f.ResourceVersion}
}
