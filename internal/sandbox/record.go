package sandbox

import (
	"slices"
	"time"

	"agentrun.dev/internal/network/policy"
)

// State is the state of a sandbox.
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

// Reason is the reason for the end of a sandbox.
type Reason string

// The reasons.
const (
	ReasonKilled      Reason = "killed"        // by request
	ReasonTimeout     Reason = "timeout"       // its time was up
	ReasonIdle        Reason = "idle_timeout"  // no client used it
	ReasonExited      Reason = "exited"        // it powered itself off
	ReasonCrashed     Reason = "crashed"       // its kernel or its machine failed
	ReasonOutOfMemory Reason = "out_of_memory" // its limit was reached
	ReasonHostRestart Reason = "host_restart"
	ReasonLost        Reason = "lost" // it was gone when the daemon restarted
)

// TimeoutAction is the action at the end of a sandbox's time.
type TimeoutAction string

// The actions.
const (
	TimeoutKill      TimeoutAction = "kill"
	TimeoutPause     TimeoutAction = "pause"
	TimeoutHibernate TimeoutAction = "hibernate"
)

// ClaimSpec is the request of a claim.
type ClaimSpec struct {
	Pool Name `json:"pool"`
	Env  Env  `json:"env,omitempty"`
	// Secrets become variables of the environment when the claim is made.
	Secrets  []SecretRef       `json:"secrets,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
	// NetworkPolicy narrows the template's policy; nil leaves it unchanged.
	NetworkPolicy *policy.Policy `json:"networkPolicy,omitempty"`
	Lifetime
}

// Lifetime bounds a sandbox's life. A zero field is no bound.
type Lifetime struct {
	Timeout     time.Duration `json:"timeout,omitempty"`
	IdleTimeout time.Duration `json:"idleTimeout,omitempty"`
	// OnTimeout is the action at the end of either timeout; empty is kill.
	OnTimeout TimeoutAction `json:"onTimeout,omitempty"`
	// Expires is when it ends, in any state; zero is never.
	Expires time.Time `json:"expires,omitzero"`
}

// Sandbox is one sandbox, from its claim or fork until some time after its end.
type Sandbox struct {
	Key
	Versioned
	ID    ID    `json:"id"`
	State State `json:"state"`
	// Pool and Template are the ones that its first ancestor came from.
	Pool     Name              `json:"pool"`
	Template Name              `json:"template"`
	Revision string            `json:"revision"`
	Engine   string            `json:"engine"`
	Env      Env               `json:"env,omitempty"` // without the secrets
	Metadata map[string]string `json:"metadata,omitempty"`
	Workdir  string            `json:"workdir"`
	User     string            `json:"user,omitempty"`
	Limits   Limits            `json:"limits"`
	// Memory is the memory that it reserves while it has a machine. Layers and Live
	// are further things that the machine holds in memory: the layers of the snapshot
	// that it was made of, and those of live forks.
	Memory uint64 `json:"memory"`
	Layers []Held `json:"layers,omitempty"`
	Live   []Held `json:"live,omitempty"`

	// Egress says where it may connect to.
	Egress Egress `json:"egress,omitzero"`

	// Secrets lists the secrets present in its memory. SecretsBy is the
	// principal that claimed it with them, or that claimed the sandbox that it
	// was forked from.
	Secrets   []SecretRef `json:"secrets,omitempty"`
	SecretsBy Principal   `json:"secretsBy,omitempty"`
	// Given are the variables whose secret values came with the claim. The values are not
	// kept.
	Given []string `json:"given,omitempty"`
	// TrustedCA is the fingerprint of the CA of its namespace, if it trusts that CA, and
	// empty otherwise.
	TrustedCA string `json:"trustedCA,omitempty"`

	// Owner is the object of a controller that it was claimed for, if any. Token is the hash
	// of its token; if it is empty, the node derives the token from the id.
	Owner UID       `json:"owner,omitempty"`
	Token TokenHash `json:"token,omitempty"`

	// Parent is the sandbox that it continues from. Fork or Checkpoint names the
	// object that it was made from.
	Parent     ID   `json:"parent,omitempty"`
	Fork       Name `json:"fork,omitempty"`
	Checkpoint Name `json:"checkpoint,omitempty"`

	Created time.Time `json:"created"`
	Ended   time.Time `json:"ended,omitzero"`
	Reason  Reason    `json:"reason,omitempty"`
	// Detail adds to the reason.
	Detail string `json:"detail,omitempty"`

	Lifetime
	Clock Clock `json:"clock"`

	// Machine names the folder of its machine, Asleep the folder of the snapshot that it was
	// hibernated to. A running sandbox needs Machine, a hibernated one Asleep.
	Machine ID `json:"machine,omitempty"`
	Asleep  ID `json:"image,omitempty"`
	// Kept is the space on disk that this snapshot needs beyond its template,
	// in bytes.
	Kept uint64 `json:"kept,omitempty"`
	// Boot is the host's boot in which Machine was made.
	Boot string `json:"boot,omitempty"`

	// Unresponsive says why its running machine cannot be reached; empty if it can be.
	// Each daemon finds out by itself.
	Unresponsive string `json:"unresponsive,omitempty"`
}

// Limits bound a sandbox's use of its host; 0 is no limit. The journal uses these
// names.
type Limits struct {
	MilliCPUs uint64   `json:"MilliCPUs"`
	IO        IOLimits `json:"IO"`
}

// IOLimits apply to each disk.
type IOLimits struct {
	BytesPerSecond uint64 `json:"BytesPerSecond"`
	OpsPerSecond   uint64 `json:"OpsPerSecond"`
}

// Held is something in the host's memory besides a sandbox's own: a layer that
// it maps, or was restored from. If several sandboxes share it, they have the
// same ID for it.
type Held struct {
	ID    string `json:"id"`
	Bytes uint64 `json:"bytes"`
}

// Child is the record of a sandbox that continues from s, before it has a
// machine.
func (s Sandbox) Child(name Name) Sandbox {
	s.Parent, s.Name, s.Fork, s.Checkpoint = s.ID, name, "", ""
	s.Machine, s.Boot, s.Asleep, s.Clock = "", "", "", Clock{}
	s.Layers, s.Live, s.Kept, s.Unresponsive = nil, nil, 0, ""
	s.Owner, s.Token = "", ""
	return s
}

// End updates the record of a sandbox at its end.
func (s *Sandbox) End(reason Reason, detail string, now time.Time) {
	s.State, s.Reason, s.Detail, s.Ended = Ended, reason, detail, now.UTC()
	s.Clock.Stop(now)
	s.Machine, s.Asleep, s.Boot = "", "", ""
	s.Layers, s.Live, s.Kept, s.Unresponsive = nil, nil, 0, ""
}

// Holds lists everything that the sandbox's machine holds in memory besides its
// own memory.
func (s Sandbox) Holds() []Held { return slices.Concat(s.Layers, s.Live) }

// Visible reports whether clients see the sandbox: one that is starting does not
// exist for them yet.
func (s Sandbox) Visible() bool { return s.State != Starting }

// Position orders sandboxes: after an end another sandbox may have the same
// name.
func (s Sandbox) Position() string { return string(s.Name) + "/" + string(s.ID) }

// PoolKey is the key of the pool that the sandbox came from.
func (s Sandbox) PoolKey() Key { return Key{s.Namespace, s.Pool} }

// HoldsSecrets reports whether its memory has secrets in it, or secrets are put into
// its requests.
func (s Sandbox) HoldsSecrets() bool { return len(s.Secrets) > 0 || len(s.Given) > 0 }
