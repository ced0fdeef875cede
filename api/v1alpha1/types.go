// Package v1alpha1 is the form in which people write AgentRun's objects: the
// same YAML for `agentrun apply` on one machine and for a cluster.
package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// APIVersion is the group and version of all kinds.
const APIVersion = "agentrun.dev/v1alpha1"

// The kinds.
const (
	KindSandboxTemplate = "SandboxTemplate"
	KindSandboxPool     = "SandboxPool"
	KindSandboxClaim    = "SandboxClaim"
	KindSandboxFork     = "SandboxFork"
)

// SandboxTemplate describes sandboxes: what they are made of and how they are
// warmed up.
type SandboxTemplate struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec SandboxTemplateSpec `json:"spec"`
}

// SandboxTemplateSpec is what a template is made of.
type SandboxTemplateSpec struct {
	// Image is a local tag, or a reference that a registry knows.
	Image string `json:"image"`
	// Init are shell commands that run one after another before the snapshot.
	Init []string `json:"init,omitempty"`
	Env  []EnvVar `json:"env,omitempty"`
	// Workdir is the working folder of everything; /workspace if it is empty.
	Workdir string `json:"workdir,omitempty"`
	// User runs everything; the image's if it is empty.
	User      string    `json:"user,omitempty"`
	Resources Resources `json:"resources,omitempty"`
	// Ready says when a sandbox is ready to be captured or claimed.
	Ready *ReadyCheck `json:"ready,omitempty"`
	// Warmup is code that runs in a language kernel, so that what it has imported
	// is in the snapshot.
	Warmup *Warmup `json:"warmup,omitempty"`

	Volumes []Volume `json:"volumes,omitempty"`
	// Network is empty, or none: then sandboxes have no network interface.
	Network string `json:"network,omitempty"`
	// NetworkPolicy is what sandboxes may connect to, and bounds what claims ask for;
	// if it is missing, they may connect to nothing.
	NetworkPolicy *NetworkPolicy `json:"networkPolicy,omitempty"`
	// BuildNetwork is what init commands, ready check and warm-up may connect to; if
	// it is missing, the node's default holds.
	BuildNetwork *NetworkPolicy `json:"buildNetwork,omitempty"`
	// TrustNamespaceCA puts the namespace's CA into the trust stores of the image, so
	// that claims can have inject in their secrets.
	TrustNamespaceCA bool `json:"trustNamespaceCA,omitempty"`
	// BuildTimeout is how long init commands, ready check and warm-up may take
	// together; half an hour if it is missing.
	BuildTimeout *metav1.Duration `json:"buildTimeout,omitempty"`
}

// EnvVar is an environment variable.
type EnvVar struct {
	Name  string `json:"name"`
	Value string `json:"value,omitempty"`
}

// Resources is what a sandbox may use.
type Resources struct {
	CPU    resource.Quantity `json:"cpu,omitempty"`    // 1 if it is missing
	Memory resource.Quantity `json:"memory,omitempty"` // 512Mi if it is missing
	// Disk is how much a sandbox may write over its image. If it is missing, what
	// is written is in its memory, and is at most half of that.
	Disk resource.Quantity `json:"disk,omitempty"`
}

// ReadyCheck has one of Command, Port and Delay.
type ReadyCheck struct {
	// Command is ready when it exits with 0.
	Command string `json:"command,omitempty"`
	// Port is ready when something listens on it.
	Port int32 `json:"port,omitempty"`
	// Delay is ready when that much time has passed.
	Delay *metav1.Duration `json:"delay,omitempty"`
	// Timeout is how long it may take; a minute if it is missing.
	Timeout *metav1.Duration `json:"timeout,omitempty"`
}

// Warmup is code for a language kernel.
type Warmup struct {
	Language string `json:"language,omitempty"` // python if it is empty
	Code     string `json:"code"`
}

// Volume is a folder that has a life of its own.
type Volume struct {
	Name       string            `json:"name"`
	MountPath  string            `json:"mountPath,omitempty"`
	Size       resource.Quantity `json:"size,omitempty"`
	ForkPolicy string            `json:"forkPolicy,omitempty"`
}

// NetworkPolicy says what a sandbox can connect to. The more precise rule decides,
// and deny before allow at equal precision.
type NetworkPolicy struct {
	// Egress is what holds where no rule matches: deny, or allow, which opens the
	// public internet; deny if it is empty.
	Egress string `json:"egress,omitempty"`
	// Allow and Deny are rules: [tcp://|udp://]HOST[:PORT]. HOST is a name, a wildcard
	// such as *.example.org, an address or a range of addresses.
	Allow []string `json:"allow,omitempty"`
	Deny  []string `json:"deny,omitempty"`
}

// SandboxPool keeps sandboxes of a template ready to be claimed.
type SandboxPool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec SandboxPoolSpec `json:"spec"`
}

// SandboxPoolSpec is what a pool keeps.
type SandboxPoolSpec struct {
	TemplateRef Ref `json:"templateRef"`
	// Replicas is how many sandboxes wait; 1 if it is missing.
	Replicas *int32 `json:"replicas,omitempty"`
	// SnapshotAfter is Ready, or Init: then each sandbox passes the ready check
	// and the warm-up by itself.
	SnapshotAfter string `json:"snapshotAfter,omitempty"`
	// MaxSurge is how many more than Replicas there may be while a revision replaces
	// another; a quarter of Replicas and at least 1 if it is missing. MaxUnavailable is
	// how many fewer may wait meanwhile; 0 if it is missing.
	MaxSurge       *int32 `json:"maxSurge,omitempty"`
	MaxUnavailable *int32 `json:"maxUnavailable,omitempty"`
}

// Ref names another object of the same namespace.
type Ref struct {
	Name string `json:"name"`
}

// SandboxClaim is a sandbox of a pool.
type SandboxClaim struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec SandboxClaimSpec `json:"spec"`
}

// SandboxClaimSpec is what a claim asks for.
type SandboxClaimSpec struct {
	PoolRef  Ref               `json:"poolRef"`
	Env      []EnvVar          `json:"env,omitempty"`
	Secrets  []Secret          `json:"secrets,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
	// Timeout counts the time that the sandbox runs, IdleTimeout the time that
	// nobody uses it; OnTimeout is kill, pause or hibernate.
	Timeout     *metav1.Duration `json:"timeout,omitempty"`
	IdleTimeout *metav1.Duration `json:"idleTimeout,omitempty"`
	OnTimeout   string           `json:"onTimeout,omitempty"`
	// NetworkPolicy narrows the template's.
	NetworkPolicy *NetworkPolicy `json:"networkPolicy,omitempty"`
}

// Secret is a value of a secret that a sandbox gets as an environment variable,
// named by the key:
//
//	secrets: [{name: llm, key: OPENAI_API_KEY}]
type Secret struct {
	// Name is the secret's. With SecretRef, which names the secret, it is that of
	// the entry, and no other has it.
	Name string `json:"name,omitempty"`
	// Key is which of the secret's values.
	Key string `json:"key,omitempty"`
	// Env is the variable; empty is the key.
	Env       string     `json:"env,omitempty"`
	SecretRef *SecretRef `json:"secretRef,omitempty"`
	// Inject keeps the value outside: the variable has a placeholder, and the value is
	// put into requests on their way out.
	Inject *Inject `json:"inject,omitempty"`
}

// Inject puts a value into a header of requests to one host, over TLS on port 443.
type Inject struct {
	Host   string `json:"host"`
	Header string `json:"header"`
	// Format is the header with {} for the value, such as "Bearer {}"; {} if it is
	// missing.
	Format string `json:"format,omitempty"`
}

// SecretRef is a key of a Secret.
type SecretRef struct {
	Name string `json:"name"`
	Key  string `json:"key"`
}

// SandboxFork is copies of a running sandbox.
type SandboxFork struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec SandboxForkSpec `json:"spec"`
}

// SandboxForkSpec is what a fork asks for.
type SandboxForkSpec struct {
	// SourceRef is a claim or a child of a fork.
	SourceRef Ref `json:"sourceRef"`
	// Replicas is how many; 1 if it is missing.
	Replicas *int32 `json:"replicas,omitempty"`
	// AllowSecretInheritance would let children have the source's secrets though
	// another principal has supplied them. It is refused: who supplied them forks.
	AllowSecretInheritance bool `json:"allowSecretInheritance,omitempty"`
	// NetworkPolicy narrows the source's, for the children.
	NetworkPolicy *NetworkPolicy `json:"networkPolicy,omitempty"`
}
