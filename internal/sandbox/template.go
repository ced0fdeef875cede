// Package sandbox is the vocabulary of a node: templates, pools, sandboxes, forks,
// checkpoints, secrets and quotas, their names, their errors, and what is valid. It
// does nothing with them: package node does. docs/design/forkd.md has the whole.
package sandbox

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"slices"
	"time"

	"agentrun.dev/internal/network/policy"
)

// Kind is a kind of object.
type Kind string

// The kinds.
const (
	KindNode     Kind = "node"
	KindTemplate Kind = "template"
	KindPool     Kind = "pool"
	KindSandbox  Kind = "sandbox"
	KindFork     Kind = "fork"
	KindSecret   Kind = "secret"
	// KindCheckpoint is of what is on disk.
	KindCheckpoint Kind = "checkpoint"
)

// Env is environment variables by name.
type Env map[string]string

// Strings is the environment as execs take it, sorted.
func (e Env) Strings() []string {
	out := make([]string, 0, len(e))
	for name, value := range e {
		out = append(out, name+"="+value)
	}
	slices.Sort(out)
	return out
}

// TemplateSpec is what a template is made of.
type TemplateSpec struct {
	// Image is a local tag, or what a registry knows.
	Image string `json:"image"`
	// Init are shell commands, run one after another before the snapshot.
	Init []string `json:"init,omitempty"`
	// Env, Workdir and User hold for all that runs in the sandboxes. What is
	// empty comes from the image; the working folder is then /workspace.
	Env     Env    `json:"env,omitempty"`
	Workdir string `json:"workdir,omitempty"`
	User    string `json:"user,omitempty"`
	// MilliCPUs are thousandths of a processor, Memory is in bytes.
	MilliCPUs uint64 `json:"milliCPUs"`
	Memory    uint64 `json:"memory"`
	// Disk is the size, in bytes, of the layer over the image that a sandbox
	// writes to. With 0 that is in its memory, and holds half as much.
	Disk  uint64      `json:"disk,omitempty"`
	Ready *ReadyCheck `json:"ready,omitempty"`
	// Warmup is code that an interpreter runs, so that what it has
	// imported and computed is in the snapshot.
	Warmup *Program `json:"warmup,omitempty"`

	Network NetworkMode `json:"network,omitempty"`
	// NetworkPolicy is what sandboxes may connect to, and bounds what claims ask for;
	// nil is that they may connect to nothing. BuildNetwork is what init commands,
	// ready check and warm-up may connect to; nil is the node's default.
	NetworkPolicy *policy.Policy `json:"networkPolicy,omitempty"`
	BuildNetwork  *policy.Policy `json:"buildNetwork,omitempty"`
	// TrustNamespaceCA puts the namespace's CA into the trust stores of the image, so
	// that claims can have values put into requests.
	TrustNamespaceCA bool `json:"trustNamespaceCA,omitempty"`

	// BuildTimeout is how long init commands, ready check and warm-up may take
	// together; 0 is DefaultBuildTimeout.
	BuildTimeout time.Duration `json:"buildTimeout,omitempty"`
}

// BuildLimit is BuildTimeout with what holds where it is missing.
func (s TemplateSpec) BuildLimit() time.Duration {
	if s.BuildTimeout == 0 {
		return DefaultBuildTimeout
	}
	return s.BuildTimeout
}

// ReadyCheck says when a sandbox is ready. One of its fields is set.
type ReadyCheck struct {
	// Command is ready when it exits with 0, Port when something listens on it,
	// Delay when that much time has passed.
	Command string        `json:"command,omitempty"`
	Port    uint16        `json:"port,omitempty"`
	Delay   time.Duration `json:"delay,omitempty"`
	// Timeout is how long it may take; 0 is a minute.
	Timeout time.Duration `json:"timeout,omitempty"`
}

// Program is code in a language that has an interpreter.
type Program struct {
	Language string `json:"language"`
	Text     string `json:"text"`
}

// Stage is when a template's snapshot is taken.
type Stage string

// The stages: after the init commands, or after the ready check and the warm-up.
const (
	AfterInit  Stage = "Init"
	AfterReady Stage = "Ready"
)

// Phase is how far a template or a pool is.
type Phase string

// The phases.
const (
	PhasePending  Phase = "Pending"
	PhaseBuilding Phase = "Building"
	PhaseReady    Phase = "Ready"
	PhaseFailed   Phase = "Failed"
)

// Template describes sandboxes.
type Template struct {
	Key
	Versioned
	Spec TemplateSpec `json:"spec"`
	// Revision is Spec.RevisionWith the CA that its sandboxes are to trust, and Image.
	Revision string    `json:"revision"`
	Created  time.Time `json:"created"`
	// Image is the digest of its image, from when it was applied. Templates of earlier
	// programs have none, and those whose image was not found.
	Image string `json:"image,omitempty"`
	// Owner is the object of a controller that it is of; empty is none.
	Owner UID `json:"owner,omitempty"`
}

// Identity is that of a template.
func (t Template) Identity() Identity {
	return Identity{Kind: KindTemplate, Key: t.Key, Owner: t.Owner, Version: t.ResourceVersion}
}

// Build is what became of a template's revision.
type Build struct {
	Versioned
	Template Key    `json:"template"`
	Revision string `json:"revision"`
	Stage    Stage  `json:"stage"`
	Phase    Phase  `json:"phase"`
	// Problem is why it failed; of one that is Pending, why it is tried again.
	Problem string `json:"problem,omitempty"`
	// Cause is what Problem leaves out, for admins: how a registry could not be reached.
	Cause string `json:"cause,omitempty"`
	// Attempts is how often it was tried, Next when it is tried again.
	Attempts int       `json:"attempts,omitempty"`
	Next     time.Time `json:"next,omitzero"`
	// Started is when it was tried last, or asked for.
	Started  time.Time `json:"started"`
	Finished time.Time `json:"finished,omitzero"`
	// Snapshot is where it is, or is to be; its log has the same name.
	Snapshot ID `json:"snapshot"`
	// Spec is what it was made of, once it is Ready; builds of earlier programs lack it.
	Spec *TemplateSpec `json:"spec,omitempty"`
	// Outdated is why its snapshot is made anew: another AgentRun has made it. It serves
	// until then.
	Outdated string `json:"outdated,omitempty"`
	// Kept is what its snapshot and its log take on disk, in bytes, once it is over.
	Kept uint64 `json:"kept,omitempty"`
	// Fetch says that its snapshot is fetched, and not built; nil once it is over.
	Fetch *FetchOrder `json:"fetch,omitempty"`
	Built
}

// Shares is what a build that is over takes on disk in common with others of its namespace:
// its image, if a build has pulled it.
func (b Build) Shares() []Held {
	if b.Pulled == 0 {
		return nil
	}
	return []Held{{ID: "image " + b.Image, Bytes: b.Pulled}}
}

// Over reports whether the build has ended, one way or the other.
func (b Build) Over() bool { return b.Phase == PhaseReady || b.Phase == PhaseFailed }

// Counts reports whether the build counts in the disk quota of its namespace. One that is
// being replaced does not: its tenant has not asked for two.
func (b Build) Counts() bool { return b.Over() && b.Outdated == "" }

// Built is what a build found out.
type Built struct {
	// Image is the digest of the image that it is made of.
	Image string `json:"image,omitempty"`
	// Pulled is what that image takes on disk beside the snapshot, in bytes, if a build
	// has pulled it; 0 is one that an administrator has put there.
	Pulled uint64 `json:"pulled,omitempty"`
	// Env, Workdir and User are those of the template, completed by the image's.
	Env     Env    `json:"env,omitempty"`
	Workdir string `json:"workdir,omitempty"`
	User    string `json:"user,omitempty"`
	// Lineage is what sandboxes inherit of the network of the build.
	Lineage *Lineage `json:"lineage,omitempty"`
	// TrustedCA is the fingerprint of the CA in its trust stores; empty is none.
	TrustedCA string `json:"trustedCA,omitempty"`
}

// PoolSpec is what a pool keeps.
type PoolSpec struct {
	Template Name  `json:"template"`
	Replicas int   `json:"replicas"`
	Stage    Stage `json:"stage"`
	// MaxSurge is how many more than Replicas there may be while a revision replaces
	// another; nil is a quarter of Replicas, at least 1. MaxUnavailable is how many fewer
	// may wait meanwhile; nil is 0.
	MaxSurge       *int `json:"maxSurge,omitempty"`
	MaxUnavailable *int `json:"maxUnavailable,omitempty"`
}

// Rollout is MaxSurge and MaxUnavailable with what holds where they are missing.
func (p PoolSpec) Rollout() (surge, unavailable int) {
	surge = max(1, (p.Replicas+3)/4)
	if p.MaxUnavailable != nil {
		unavailable = *p.MaxUnavailable
	}
	if p.MaxSurge != nil {
		surge = *p.MaxSurge
	}
	return surge, unavailable
}

// Pool keeps sandboxes of a template ready.
type Pool struct {
	Key
	Versioned
	Spec    PoolSpec  `json:"spec"`
	Created time.Time `json:"created"`
	// Owner is the object of a controller that it is of; empty is none.
	Owner UID `json:"owner,omitempty"`
}

// Identity is that of a pool.
func (p Pool) Identity() Identity {
	return Identity{Kind: KindPool, Key: p.Key, Owner: p.Owner, Version: p.ResourceVersion}
}

// PoolStatus is what a pool has.
type PoolStatus struct {
	Phase Phase `json:"phase"`
	// Ready sandboxes have answered and can be claimed; Snapshots are those of
	// them that are of the template's current revision.
	Ready     int    `json:"ready"`
	Snapshots int    `json:"snapshots"`
	Problem   string `json:"problem,omitempty"`
}

// Digest is the revision of a spec: of everything that its snapshot depends on.
// What sandboxes may connect to, and how long a build may take, can change without a
// build.
func (s TemplateSpec) Digest() string {
	s.NetworkPolicy, s.BuildTimeout = nil, 0
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // it has only plain fields
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8])
}
