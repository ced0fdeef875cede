// Package v1alpha1 defines the YAML form of AgentRun's objects, the same for
// `agentrun apply` on one machine and for a cluster.
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

// SandboxTemplate describes sandboxes: their image and settings, and how they
// are warmed up.
type SandboxTemplate struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec SandboxTemplateSpec `json:"spec"`
}

// SandboxTemplateSpec is the content of a template.
type SandboxTemplateSpec struct {
	// Image is a local tag, or a reference that a registry knows.
	Image string `json:"image"`
	// Init are shell commands that run one after another before the snapshot.
	Init []string `json:"init,omitempty"`
	Env  []EnvVar `json:"env,omitempty"`
	// Workdir is the folder that all programs start in; /workspace if it is
	// empty.
	Workdir string `json:"workdir,omitempty"`
	// User is the user that all programs run as; the image's if it is empty.
	User      string    `json:"user,omitempty"`
	Resources Resources `json:"resources,omitempty"`
	// Ready decides when a sandbox is ready to be captured or claimed.
	Ready *ReadyCheck `json:"ready,omitempty"`
	// Warmup is code that runs in a language interpreter, so that the snapshot
	// includes its imports.
	Warmup *Warmup `json:"warmup,omitempty"`

	Volumes []Volume `json:"volumes,omitempty"`
	// Network is empty or "none". With "none", sandboxes have no network
	// interface.
	Network string `json:"network,omitempty"`
	// NetworkPolicy says which hosts sandboxes may connect to, and bounds the
	// policies of claims. If it is missing, sandboxes cannot connect to any host.
	NetworkPolicy *NetworkPolicy `json:"networkPolicy,omitempty"`
	// BuildNetwork says which hosts init commands, ready check and warm-up may
	// connect to. If it is missing, the node's default applies.
	BuildNetwork *NetworkPolicy `json:"buildNetwork,omitempty"`
	// TrustNamespaceCA puts the namespace's CA into the trust stores of the image.
	// Without it, claims cannot use inject in their secrets.
	TrustNamespaceCA bool `json:"trustNamespaceCA,omitempty"`
	// BuildTimeout is the time limit for init commands, ready check and warm-up
	// together; half an hour if it is missing.
	BuildTimeout *metav1.Duration `json:"buildTimeout,omitempty"`
}

// EnvVar is an environment variable.
type EnvVar struct {
	Name  string `json:"name"`
	Value string `json:"value,omitempty"`
}

// Resources are the resources that a sandbox may use.
type Resources struct {
	CPU    resource.Quantity `json:"cpu,omitempty"`    // 1 if it is missing
	Memory resource.Quantity `json:"memory,omitempty"` // 512Mi if it is missing
	// Disk is the number of bytes that a sandbox may write over its image. If it
	// is missing, written data is in the sandbox's memory, and takes at most half
	// of that.
	Disk resource.Quantity `json:"disk,omitempty"`
}

// ReadyCheck has exactly one of Command, Port and Delay.
type ReadyCheck struct {
	// Command means ready when it exits with 0.
	Command string `json:"command,omitempty"`
	// Port means ready when a program listens on it.
	Port int32 `json:"port,omitempty"`
	// Delay means ready after that time.
	Delay *metav1.Duration `json:"delay,omitempty"`
	// Timeout is the time limit of the check; a minute if it is missing.
	Timeout *metav1.Duration `json:"timeout,omitempty"`
}

// Warmup is code for a language interpreter.
type Warmup struct {
	Language string `json:"language,omitempty"` // python if it is empty
	Code     string `json:"code"`
}

// Volume is a folder with a lifetime of its own.
type Volume struct {
	Name       string            `json:"name"`
	MountPath  string            `json:"mountPath,omitempty"`
	Size       resource.Quantity `json:"size,omitempty"`
	ForkPolicy string            `json:"forkPolicy,omitempty"`
}

// NetworkPolicy says which hosts a sandbox may connect to. The most precise
// matching rule decides; at equal precision, deny comes before allow.
type NetworkPolicy struct {
	// Egress decides where no rule matches: deny, or allow, which opens the
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

// SandboxPoolSpec is the content of a pool.
type SandboxPoolSpec struct {
	TemplateRef Ref `json:"templateRef"`
	// Replicas is how many sandboxes wait to be claimed; 1 if it is missing.
	Replicas *int32 `json:"replicas,omitempty"`
	// SnapshotAfter is Ready or Init. With Init, each sandbox passes the ready
	// check and the warm-up by itself.
	SnapshotAfter string `json:"snapshotAfter,omitempty"`
	// MaxSurge is how many sandboxes above Replicas may exist while one revision
	// replaces another. If it is missing, it is a quarter of Replicas, at least 1.
	// MaxUnavailable is by how many fewer than Replicas may wait meanwhile; 0 if it is
	// missing.
	MaxSurge       *int32 `json:"maxSurge,omitempty"`
	MaxUnavailable *int32 `json:"maxUnavailable,omitempty"`
}

// Ref names another object of the same namespace.
type Ref struct {
	Name string `json:"name"`
}

// SandboxClaim claims a sandbox of a pool.
type SandboxClaim struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec SandboxClaimSpec `json:"spec"`
}

// SandboxClaimSpec is the content of a claim.
type SandboxClaimSpec struct {
	PoolRef  Ref               `json:"poolRef"`
	Env      []EnvVar          `json:"env,omitempty"`
	Secrets  []Secret          `json:"secrets,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
	// Timeout limits the time that the sandbox runs, IdleTimeout the time
	// without users. OnTimeout is kill, pause or hibernate.
	Timeout     *metav1.Duration `json:"timeout,omitempty"`
	IdleTimeout *metav1.Duration `json:"idleTimeout,omitempty"`
	OnTimeout   string           `json:"onTimeout,omitempty"`
	// NetworkPolicy narrows the template's policy.
	NetworkPolicy *NetworkPolicy `json:"networkPolicy,omitempty"`
}

// Secret gives a sandbox a value of a secret as an environment variable, which
// is named after the key:
//
//	secrets: [{name: llm, key: OPENAI_API_KEY}]
type Secret struct {
	// Name is the secret's name. If SecretRef names the secret, Name is the name
	// of the entry instead, which is unique among the entries.
	Name string `json:"name,omitempty"`
	// Key selects one of the secret's values.
	Key string `json:"key,omitempty"`
	// Env is the name of the variable; the key if it is empty.
	Env       string     `json:"env,omitempty"`
	SecretRef *SecretRef `json:"secretRef,omitempty"`
	// Inject keeps the value outside of the sandbox: the variable has a placeholder,
	// and outgoing requests get the value.
	Inject *Inject `json:"inject,omitempty"`
}

// Inject puts a value into a header of requests to one host, over TLS on port 443.
type Inject struct {
	Host   string `json:"host"`
	Header string `json:"header"`
	// Format is the content of the header, with {} for the value, such as "Bearer
	// {}"; {} if it is missing.
	Format string `json:"format,omitempty"`
}

// SecretRef names a key of a Secret.
type SecretRef struct {
	Name string `json:"name"`
	Key  string `json:"key"`
}

// SandboxFork makes copies of a running sandbox.
type SandboxFork struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec SandboxForkSpec `json:"spec"`
}

// SandboxForkSpec is the content of a fork.
type SandboxForkSpec struct {
	// SourceRef names a claim, or a child of a fork.
	SourceRef Ref `json:"sourceRef"`
	// Replicas is the number of children; 1 if it is missing.
	Replicas *int32 `json:"replicas,omitempty"`
	// AllowSecretInheritance would let another principal fork a source with
	// secrets. It is refused: only the principal that supplied the secrets may
	// fork the source.
	AllowSecretInheritance bool `json:"allowSecretInheritance,omitempty"`
	// NetworkPolicy narrows the source's policy, for the children.
	NetworkPolicy *NetworkPolicy `json:"networkPolicy,omitempty"`
}
