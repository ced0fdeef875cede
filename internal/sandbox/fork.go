package sandbox

import (
	"strconv"
	"time"

	"agentrun.dev/internal/network/policy"
)

// ForkSpec is what a fork asks for.
type ForkSpec struct {
	Source   Name
	Replicas int
	// NetworkPolicy narrows the source's for the children; nil leaves it as it is.
	NetworkPolicy *policy.Policy
	// Children has one entry for each of them, or none at all.
	Children []ForkChild
	// Atomic makes all children, or none.
	Atomic bool
	// Checkpoint is the name of a checkpoint of the same instant; empty makes none.
	Checkpoint Name
}

// ForkChild is what one child is to be.
type ForkChild struct {
	// Name is empty for <fork>-<number>.
	Name Name
	// Owner is the object of a controller that the child is for. All children have one, or
	// none has: then the fork is known by its name and its owners if it comes again.
	Owner UID
	// Token is the hash of the child's token; empty leaves that to the node.
	Token TokenHash
}

// Child is what the child of a number, counted from 0, is to be.
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

// ValidateAs refuses children that a fork of a name cannot have.
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

// ForkOutcome is what became of one child.
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
	// Pause is for how long the source stood still.
	Pause time.Duration `json:"pause,omitempty"`
	// By is who asked for it, HoldsSecrets whether the children have secrets.
	By           Principal `json:"by,omitempty"`
	HoldsSecrets bool      `json:"holdsSecrets,omitempty"`
	// Checkpoint is of the same instant; empty is none.
	Checkpoint Name `json:"checkpoint,omitempty"`
	// Asked has a digest of each field that a fork whose children have owners has set.
	Asked map[string]string `json:"asked,omitempty"`
}

// Identity is that of a fork, which has no id.
func (f Fork) Identity() Identity {
	return Identity{Kind: KindFork, Key: f.Key, Version: f.ResourceVersion}
}
