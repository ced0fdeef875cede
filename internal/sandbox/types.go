// Package sandbox owns the objects of a node and their life: templates, pools,
// sandboxes, forks and checkpoints. Its Manager is the only writer of the
// journal. docs/design/forkd.md has the whole.
package sandbox

import (
	"time"

	"agentrun.dev/internal/engine"
)

// Kind is a kind of object.
type Kind string

// The kinds.
const (
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
	// Warmup is code that is run in a language kernel, so that what it has
	// imported and computed is in the snapshot.
	Warmup *Program `json:"warmup,omitempty"`
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

// Program is code in a language that has a kernel.
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
	Spec TemplateSpec `json:"spec"`
	// Revision is the digest of Spec.
	Revision string    `json:"revision"`
	Created  time.Time `json:"created"`
}

// Build is what became of a template's revision.
type Build struct {
	Template Key       `json:"template"`
	Revision string    `json:"revision"`
	Stage    Stage     `json:"stage"`
	Phase    Phase     `json:"phase"`
	Problem  string    `json:"problem,omitempty"` // why it failed
	Started  time.Time `json:"started"`
	Finished time.Time `json:"finished,omitzero"`
	// Snapshot is where it is, or is to be; its log has the same name.
	Snapshot ID `json:"snapshot"`
	Built
}

// Built is what a build found out.
type Built struct {
	// Image is the digest of the image that it is made of.
	Image string `json:"image,omitempty"`
	// Env, Workdir and User are those of the template, completed by the image's.
	Env     Env    `json:"env,omitempty"`
	Workdir string `json:"workdir,omitempty"`
	User    string `json:"user,omitempty"`
}

// PoolSpec is what a pool keeps.
type PoolSpec struct {
	Template Name  `json:"template"`
	Replicas int   `json:"replicas"`
	Stage    Stage `json:"stage"`
}

// Pool keeps sandboxes of a template ready.
type Pool struct {
	Key
	Spec    PoolSpec  `json:"spec"`
	Created time.Time `json:"created"`
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

// State is what a sandbox is doing.
type State string

// The states. Those that end in -ing are intents: they are settled when the
// daemon starts.
const (
	Starting    State = "Starting"
	Running     State = "Running"
	Paused      State = "Paused"
	Hibernating State = "Hibernating"
	Hibernated  State = "Hibernated"
	Resuming    State = "Resuming"
	Ended       State = "Ended"
)

// Reason is why a sandbox ended.
type Reason string

// The reasons.
const (
	ReasonKilled      Reason = "killed"        // by request
	ReasonTimeout     Reason = "timeout"       // its time was up
	ReasonIdle        Reason = "idle_timeout"  // nobody used it
	ReasonExited      Reason = "exited"        // it powered itself off
	ReasonCrashed     Reason = "crashed"       // its kernel, or what runs it
	ReasonOutOfMemory Reason = "out_of_memory" // its limit was reached
	ReasonHostRestart Reason = "host_restart"
	ReasonLost        Reason = "lost" // it was gone when the daemon came back
)

// TimeoutAction is what happens when a sandbox's time is up.
type TimeoutAction string

// The actions.
const (
	TimeoutKill      TimeoutAction = "kill"
	TimeoutPause     TimeoutAction = "pause"
	TimeoutHibernate TimeoutAction = "hibernate"
)

// ClaimSpec is what a claim asks for.
type ClaimSpec struct {
	Pool Name `json:"pool"`
	Env  Env  `json:"env,omitempty"`
	// Secrets become variables of the environment when the claim is made.
	Secrets  []SecretRef       `json:"secrets,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
	Lifetime
}

// Lifetime bounds a sandbox's life; 0 is no bound.
type Lifetime struct {
	Timeout     time.Duration `json:"timeout,omitempty"`
	IdleTimeout time.Duration `json:"idleTimeout,omitempty"`
	// OnTimeout is what either does; empty is kill.
	OnTimeout TimeoutAction `json:"onTimeout,omitempty"`
}

// Sandbox is one sandbox, from its claim or fork on and, for a while, after its
// end.
type Sandbox struct {
	Key
	ID    ID    `json:"id"`
	State State `json:"state"`
	// Pool and Template are what it came from, in the end.
	Pool     Name              `json:"pool"`
	Template Name              `json:"template"`
	Revision string            `json:"revision"`
	Engine   string            `json:"engine"`
	Env      Env               `json:"env,omitempty"` // without the secrets
	Metadata map[string]string `json:"metadata,omitempty"`
	Workdir  string            `json:"workdir"`
	User     string            `json:"user,omitempty"`
	Limits   engine.Limits     `json:"limits"`
	// Memory is what it reserves while it has a machine. Layers and Live are what the
	// machine holds in memory beside that: of the snapshot that it was made of, and
	// of live forks.
	Memory uint64        `json:"memory"`
	Layers []engine.Held `json:"layers,omitempty"`
	Live   []engine.Held `json:"live,omitempty"`

	// Secrets are those that its memory has in it, and SecretsBy who claimed it,
	// or the sandbox that it was forked from, with them.
	Secrets   []SecretRef `json:"secrets,omitempty"`
	SecretsBy Principal   `json:"secretsBy,omitempty"`

	// Parent is the sandbox that it continues from, Fork or Checkpoint what it was
	// made by.
	Parent     ID   `json:"parent,omitempty"`
	Fork       Name `json:"fork,omitempty"`
	Checkpoint Name `json:"checkpoint,omitempty"`

	Created time.Time `json:"created"`
	Ended   time.Time `json:"ended,omitzero"`
	Reason  Reason    `json:"reason,omitempty"`
	// Detail is what is known beyond the reason.
	Detail string `json:"detail,omitempty"`

	Lifetime
	Clock Clock `json:"clock"`

	// Machine is the folder of what runs it, Image that of what it was written
	// to; Running needs the one, Hibernated the other.
	Machine ID `json:"machine,omitempty"`
	Image   ID `json:"image,omitempty"`
	// Kept is what Image takes on disk beyond its template, in bytes.
	Kept uint64 `json:"kept,omitempty"`
	// Boot is the host's boot in which Machine was made.
	Boot string `json:"boot,omitempty"`
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
