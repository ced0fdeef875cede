package sandbox

import (
	"slices"
	"time"

	"agentrun.dev/internal/network/policy"
)

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
	// NetworkPolicy narrows the template's; nil leaves it as it is.
	NetworkPolicy *policy.Policy `json:"networkPolicy,omitempty"`
	Lifetime
}

// Lifetime bounds a sandbox's life; what is missing is no bound.
type Lifetime struct {
	Timeout     time.Duration `json:"timeout,omitempty"`
	IdleTimeout time.Duration `json:"idleTimeout,omitempty"`
	// OnTimeout is what either does; empty is kill.
	OnTimeout TimeoutAction `json:"onTimeout,omitempty"`
	// Expires is when it ends, whatever it is doing; zero is never.
	Expires time.Time `json:"expires,omitzero"`
}

// Sandbox is one sandbox, from its claim or fork on and, for a while, after its
// end.
type Sandbox struct {
	Key
	Versioned
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
	Limits   Limits            `json:"limits"`
	// Memory is what it reserves while it has a machine. Layers and Live are what the
	// machine holds in memory beside that: of the snapshot that it was made of, and
	// of live forks.
	Memory uint64 `json:"memory"`
	Layers []Held `json:"layers,omitempty"`
	Live   []Held `json:"live,omitempty"`

	// Egress is what it may connect to.
	Egress Egress `json:"egress,omitzero"`

	// Secrets are those that its memory has in it, and SecretsBy who claimed it,
	// or the sandbox that it was forked from, with them.
	Secrets   []SecretRef `json:"secrets,omitempty"`
	SecretsBy Principal   `json:"secretsBy,omitempty"`
	// Given are the variables whose secret values came with the claim. Nobody keeps those.
	Given []string `json:"given,omitempty"`
	// TrustedCA is the fingerprint of the CA of its namespace that it trusts; empty is none.
	TrustedCA string `json:"trustedCA,omitempty"`

	// Owner is the object of a controller that it was claimed for; empty is none. Token is the
	// hash of its token; with an empty one the node derives the token from the id.
	Owner UID       `json:"owner,omitempty"`
	Token TokenHash `json:"token,omitempty"`

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

	// Machine is the folder of what runs it, Asleep that of the snapshot that it was written
	// to; Running needs the one, Hibernated the other.
	Machine ID `json:"machine,omitempty"`
	Asleep  ID `json:"image,omitempty"`
	// Kept is what that snapshot takes on disk beyond its template, in bytes.
	Kept uint64 `json:"kept,omitempty"`
	// Boot is the host's boot in which Machine was made.
	Boot string `json:"boot,omitempty"`

	// Unresponsive is why nobody reaches its machine, which runs; empty if somebody does.
	// Each daemon finds out by itself.
	Unresponsive string `json:"unresponsive,omitempty"`
}

// Limits bound what a sandbox takes from its host; 0 is no limit. The journal has
// them under these names.
type Limits struct {
	MilliCPUs uint64   `json:"MilliCPUs"`
	IO        IOLimits `json:"IO"`
}

// IOLimits are for each disk.
type IOLimits struct {
	BytesPerSecond uint64 `json:"BytesPerSecond"`
	OpsPerSecond   uint64 `json:"OpsPerSecond"`
}

// Held is something in the host's memory beside a sandbox's own: a layer that it
// maps, or was restored from. Sandboxes that have it in common have the same ID.
type Held struct {
	ID    string `json:"id"`
	Bytes uint64 `json:"bytes"`
}

// Child is a sandbox that continues from s, before it has a machine.
func (s Sandbox) Child(name Name) Sandbox {
	s.Parent, s.Name, s.Fork, s.Checkpoint = s.ID, name, "", ""
	s.Machine, s.Boot, s.Asleep, s.Clock = "", "", "", Clock{}
	s.Layers, s.Live, s.Kept, s.Unresponsive = nil, nil, 0, ""
	s.Owner, s.Token = "", ""
	return s
}

// End is what the end of a sandbox changes in its record.
func (s *Sandbox) End(reason Reason, detail string, now time.Time) {
	s.State, s.Reason, s.Detail, s.Ended = Ended, reason, detail, now.UTC()
	s.Clock.Stop(now)
	s.Machine, s.Asleep, s.Boot = "", "", ""
	s.Layers, s.Live, s.Kept, s.Unresponsive = nil, nil, 0, ""
}

// Holds is what the sandbox's machine holds in memory beside its own.
func (s Sandbox) Holds() []Held { return slices.Concat(s.Layers, s.Live) }

// Visible reports whether a sandbox is told of: one that is starting is not there
// yet.
func (s Sandbox) Visible() bool { return s.State != Starting }

// Position orders sandboxes: names may be used again after an end.
func (s Sandbox) Position() string { return string(s.Name) + "/" + string(s.ID) }

// PoolKey is what the sandbox came from.
func (s Sandbox) PoolKey() Key { return Key{s.Namespace, s.Pool} }

// HoldsSecrets reports whether its memory has secrets in it, or its requests get some.
func (s Sandbox) HoldsSecrets() bool { return len(s.Secrets) > 0 || len(s.Given) > 0 }
