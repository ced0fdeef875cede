// Package sandbox is the vocabulary of a node: templates, pools, sandboxes, forks,
// checkpoints, secrets and quotas, with their names, errors and rules of validity.
// It only defines them; package node acts on them. docs/design/forkd.md describes
// the design.
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
	// KindCheckpoint is the kind of sandboxes' checkpoints, on disk.
	KindCheckpoint Kind = "checkpoint"
)

// Env is environment variables by name.
type Env map[string]string

// Strings returns the environment in the form that execs take, sorted.
func (e Env) Strings() []string {
	out := make([]string, 0, len(e))
	for name, value := range e {
		out = append(out, name+"="+value)
	}
	slices.Sort(out)
	return out
}

// TemplateSpec defines the sandboxes of a template.
type TemplateSpec struct {
	// Image is a local tag, or a name in a registry.
	Image string `json:"image"`
	// Init are shell commands, run one after another before the snapshot.
	Init []string `json:"init,omitempty"`
	// Env, Workdir and User apply to all programs in the sandboxes. Empty ones
	// come from the image. If the image has no working folder either, Workdir
	// is /workspace.
	Env     Env    `json:"env,omitempty"`
	Workdir string `json:"workdir,omitempty"`
	User    string `json:"user,omitempty"`
	// MilliCPUs are thousandths of a processor, Memory is in bytes.
	MilliCPUs uint64 `json:"milliCPUs"`
	Memory    uint64 `json:"memory"`
	// Disk is the size, in bytes, of the layer over the image that a sandbox
	// writes to. With 0 the layer is in the sandbox's memory, and holds half as
	// much as that.
	Disk  uint64      `json:"disk,omitempty"`
	Ready *ReadyCheck `json:"ready,omitempty"`
	// Warmup is code that an interpreter runs, so that its imports and results
	// are in the snapshot.
	Warmup *Program `json:"warmup,omitempty"`

	Network NetworkMode `json:"network,omitempty"`
	// NetworkPolicy says where sandboxes may connect to, and bounds the policies of
	// claims; nil allows no connection. BuildNetwork says where init commands, ready
	// check and warm-up may connect to; nil is the node's default.
	NetworkPolicy *policy.Policy `json:"networkPolicy,omitempty"`
	BuildNetwork  *policy.Policy `json:"buildNetwork,omitempty"`
	// TrustNamespaceCA puts the namespace's CA into the trust stores of the image, so
	// that claims can have values put into requests.
	TrustNamespaceCA bool `json:"trustNamespaceCA,omitempty"`

	// BuildTimeout is the time that init commands, ready check and warm-up may
	// take together; 0 is DefaultBuildTimeout.
	BuildTimeout time.Duration `json:"buildTimeout,omitempty"`
}

// BuildLimit is BuildTimeout, or its default.
func (s TemplateSpec) BuildLimit() time.Duration {
	if s.BuildTimeout == 0 {
		return DefaultBuildTimeout
	}
	return s.BuildTimeout
}

// ReadyCheck says when a sandbox is ready. One of its fields is set.
type ReadyCheck struct {
	// Command makes the sandbox ready when it exits with 0, Port when a program
	// listens on it, and Delay when that time has passed.
	Command string        `json:"command,omitempty"`
	Port    uint16        `json:"port,omitempty"`
	Delay   time.Duration `json:"delay,omitempty"`
	// Timeout is the time that the check may take; 0 is a minute.
	Timeout time.Duration `json:"timeout,omitempty"`
}

// Program is code in a language that has an interpreter.
type Program struct {
	Language string `json:"language"`
	Text     string `json:"text"`
}

// Stage is the point of a build at which a template's snapshot is taken.
type Stage string

// The stages: after the init commands, or after the ready check and the warm-up.
const (
	AfterInit  Stage = "Init"
	AfterReady Stage = "Ready"
)

// Phase is the progress of a template or a pool.
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
	// Revision is Spec.RevisionWith the CA that its sandboxes trust, and Image.
	Revision string    `json:"revision"`
	Created  time.Time `json:"created"`
	// Image is the digest of the template's image when it was applied. It is empty in
	// templates of earlier programs, and if the image was not found.
	Image string `json:"image,omitempty"`
	// Owner is the object of a controller that it belongs to, if any.
	Owner UID `json:"owner,omitempty"`
}

// Identity returns that of a template.
func (t Template) Identity() Identity {
	return Identity{Kind: KindTemplate, Key: t.Key, Owner: t.Owner, Version: t.ResourceVersion}
}

// Build is the build of a template's revision, and its outcome.
type Build struct {
	Versioned
	Template Key    `json:"template"`
	Revision string `json:"revision"`
	Stage    Stage  `json:"stage"`
	Phase    Phase  `json:"phase"`
	// Problem is the reason why it failed, or, in phase Pending, the reason why
	// it is tried again.
	Problem string `json:"problem,omitempty"`
	// Cause is the part of the reason that only administrators see: why a registry could
	// not be reached.
	Cause string `json:"cause,omitempty"`
	// Attempts counts the attempts. Next is when it is tried again.
	Attempts int       `json:"attempts,omitempty"`
	Next     time.Time `json:"next,omitzero"`
	// Started is when the last attempt began, or when the build was requested.
	Started  time.Time `json:"started"`
	Finished time.Time `json:"finished,omitzero"`
	// Snapshot is the id of its snapshot, also before that exists. The build's
	// log has the same id.
	Snapshot ID `json:"snapshot"`
	// Spec is the spec that it was made of, once it is Ready. Builds of earlier programs
	// lack it.
	Spec *TemplateSpec `json:"spec,omitempty"`
	// Outdated is the reason why its snapshot is made anew: another AgentRun made it.
	// The snapshot serves until then.
	Outdated string `json:"outdated,omitempty"`
	// Kept is the size of its snapshot and its log on disk, in bytes, once it is
	// over.
	Kept uint64 `json:"kept,omitempty"`
	// Fetch says that its snapshot is fetched instead of built; nil once it is
	// over.
	Fetch *FetchOrder `json:"fetch,omitempty"`
	Built
}

// Shares lists the files on disk that a build which is over has in common with others of
// its namespace: its image, if a build has pulled it.
func (b Build) Shares() []Held {
	if b.Pulled == 0 {
		return nil
	}
	return []Held{{ID: "image " + b.Image, Bytes: b.Pulled}}
}

// Over reports whether the build has ended, one way or the other.
func (b Build) Over() bool { return b.Phase == PhaseReady || b.Phase == PhaseFailed }

// Counts reports whether the build counts in the storage quota of its namespace. A build
// that is being replaced does not count: its tenant has not asked for two.
func (b Build) Counts() bool { return b.Over() && b.Outdated == "" }

// Built is the result of a build.
type Built struct {
	// Image is the digest of its image.
	Image string `json:"image,omitempty"`
	// Pulled is the size of that image on disk besides the snapshot, in bytes, if a
	// build has pulled it; 0 is an image that an administrator has put there.
	Pulled uint64 `json:"pulled,omitempty"`
	// Env, Workdir and User are those of the template, completed by those of the
	// image.
	Env     Env    `json:"env,omitempty"`
	Workdir string `json:"workdir,omitempty"`
	User    string `json:"user,omitempty"`
	// Lineage is passed from the build's network to those of the sandboxes.
	Lineage *Lineage `json:"lineage,omitempty"`
	// TrustedCA is the fingerprint of the CA in its trust stores, if there is
	// one.
	TrustedCA string `json:"trustedCA,omitempty"`
}

// PoolSpec defines the sandboxes that a pool keeps.
type PoolSpec struct {
	Template Name  `json:"template"`
	Replicas int   `json:"replicas"`
	Stage    Stage `json:"stage"`
	// MaxSurge is how many sandboxes more than Replicas may exist while a revision
	// replaces another; nil is a quarter of Replicas, at least 1. MaxUnavailable is how
	// many fewer may wait meanwhile; nil is 0.
	MaxSurge       *int `json:"maxSurge,omitempty"`
	MaxUnavailable *int `json:"maxUnavailable,omitempty"`
}

// Rollout returns MaxSurge and MaxUnavailable, or their defaults.
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
	// Owner is the object of a controller that it belongs to, if any.
	Owner UID `json:"owner,omitempty"`
}

// Identity returns that of a pool.
func (p Pool) Identity() Identity {
	return Identity{Kind: KindPool, Key: p.Key, Owner: p.Owner, Version: p.ResourceVersion}
}

// PoolStatus is the state of a pool.
type PoolStatus struct {
	Phase Phase `json:"phase"`
	// Ready counts sandboxes that have answered and can be claimed. Snapshots
	// counts those of them that are of the template's current revision.
	Ready     int    `json:"ready"`
	Snapshots int    `json:"snapshots"`
	Problem   string `json:"problem,omitempty"`
}

// Digest is the revision of a spec. It covers everything that the snapshot depends
// on. The policy of sandboxes and the timeout of a build are not part of it, and can
// change without a build.
func (s TemplateSpec) Digest() string {
	s.NetworkPolicy, s.BuildTimeout = nil, 0
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // it has only plain fields
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8])
}
