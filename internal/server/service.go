// Package server is what the APIs of a node have in common: the service that they
// serve, who may do what with it, what is written down, and the words for what goes
// wrong. Each API is a package of its own below.
package server

import (
	"context"
	"io"
	"log/slog"
	"time"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/access/audit"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/sandbox"
)

// Service is what is served. *node.Manager implements it. The context of each call
// says who makes it (sandbox.PrincipalOf). A request with an identity (sandbox.Once)
// that was done before has the same answer again, and replayed says so. A method with
// preconditions does nothing to an object that does not meet all of them. Of owners one may be
// given; who may is in the context, too (sandbox.MayOwn).
type Service interface {
	ApplyTemplate(ctx context.Context, k sandbox.Key, spec sandbox.TemplateSpec, owner ...sandbox.UID) (sandbox.Template, error)
	Template(ctx context.Context, k sandbox.Key) (sandbox.Template, error)
	Templates(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Template, error)
	Builds(ctx context.Context, t sandbox.Template) ([]sandbox.Build, error)
	CopyBuildLog(ctx context.Context, r sandbox.BuildLogRequest, w io.Writer) error
	DeleteTemplate(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) error

	ApplyPool(ctx context.Context, k sandbox.Key, spec sandbox.PoolSpec, owner ...sandbox.UID) (sandbox.Pool, error)
	Pool(ctx context.Context, k sandbox.Key) (sandbox.Pool, sandbox.PoolStatus, error)
	Pools(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Pool, error)
	DeletePool(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) error

	Claim(ctx context.Context, r sandbox.ClaimRequest) (s sandbox.Sandbox, replayed bool, err error)
	Sandbox(ctx context.Context, k sandbox.Key) (sandbox.Sandbox, error)
	SandboxByID(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error)
	// SandboxOfToken also has a context that ends when the token is replaced.
	SandboxOfToken(ctx context.Context, t sandbox.Token) (sandbox.Sandbox, context.Context, error)
	ReleaseOwner(ctx context.Context, r sandbox.ReleaseRequest) error
	Sandboxes(ctx context.Context, r sandbox.SandboxesRequest) ([]sandbox.Sandbox, error)
	Pause(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (sandbox.Sandbox, error)
	Resume(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (sandbox.Sandbox, error)
	Hibernate(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (sandbox.Sandbox, error)
	Extend(ctx context.Context, k sandbox.Key, timeout time.Duration, when ...sandbox.Precondition) (sandbox.Sandbox, error)
	SetExpiry(ctx context.Context, k sandbox.Key, at time.Time, when ...sandbox.Precondition) (sandbox.Sandbox, error)
	SetToken(ctx context.Context, k sandbox.Key, token sandbox.TokenHash, when ...sandbox.Precondition) (sandbox.Sandbox, error)
	Kill(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (sandbox.Sandbox, error)
	Use(ctx context.Context, k sandbox.Key) (sandbox.Session, error)
	SetNetworkPolicy(ctx context.Context, k sandbox.Key, own *policy.Policy, when ...sandbox.Precondition) (sandbox.Sandbox, error)
	Traffic(ctx context.Context, r sandbox.TrafficRequest) (sandbox.TrafficPage, error)

	Fork(ctx context.Context, r sandbox.ForkRequest) (f sandbox.Fork, replayed bool, err error)
	ForkOf(ctx context.Context, k sandbox.Key) (sandbox.Fork, error)
	Forks(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Fork, error)
	DeleteFork(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) error

	ApplySecret(ctx context.Context, k sandbox.Key, data sandbox.SecretData) (sandbox.Secret, error)
	SetSecret(ctx context.Context, k sandbox.Key, data sandbox.SecretData) (sandbox.Secret, error)
	Secret(ctx context.Context, k sandbox.Key) (sandbox.Secret, error)
	Secrets(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Secret, error)
	DeleteSecret(ctx context.Context, k sandbox.Key) error

	NamespaceCA(ctx context.Context, n sandbox.Namespace) (sandbox.NamespaceCA, error)
	SetNamespaceCA(ctx context.Context, n sandbox.Namespace, spec sandbox.CASpec) (sandbox.NamespaceCA, error)

	SetQuota(ctx context.Context, q sandbox.Quota) (sandbox.QuotaUse, error)
	QuotaOf(ctx context.Context, n sandbox.Namespace) (sandbox.QuotaUse, error)

	Images(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Image, error)
	PublishImage(ctx context.Context, r sandbox.PublishRequest) (sandbox.Image, error)
	UnpublishImage(ctx context.Context, image string) error
	RegistryLogins(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.RegistryLogin, error)
	SetRegistryLogin(ctx context.Context, n sandbox.Namespace, registry sandbox.RegistryHost, c sandbox.RegistryCredentials) (sandbox.RegistryLogin, error)
	DeleteRegistryLogin(ctx context.Context, n sandbox.Namespace, registry sandbox.RegistryHost) error

	Checkpoint(ctx context.Context, r sandbox.CheckpointRequest) (c sandbox.CheckpointSize, replayed bool, err error)
	CheckpointOf(ctx context.Context, k sandbox.Key) (sandbox.CheckpointSize, error)
	Checkpoints(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.CheckpointSize, error)
	DeleteCheckpoint(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) error
	Restore(ctx context.Context, r sandbox.RestoreRequest) (s sandbox.Sandbox, replayed bool, err error)

	Cost(ctx context.Context, k sandbox.Key) (sandbox.Cost, error)
	Costs(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Cost, error)
	Node(ctx context.Context) (sandbox.NodeStatus, error)
	Cordon(ctx context.Context, drain bool) (sandbox.NodeStatus, error)
	Uncordon(ctx context.Context) (sandbox.NodeStatus, error)
	Version(ctx context.Context) (sandbox.StateVersion, error)
	Watch(ctx context.Context, r sandbox.WatchRequest, each func(sandbox.Event) error) error
}

// Snapshots is what is served of snapshots that travel between nodes. *node.Manager implements it.
type Snapshots interface {
	// SnapshotOffer is what another node needs to fetch a template's snapshot, by its digest.
	SnapshotOffer(ctx context.Context, digest string) (sandbox.Offer, error)
	// FetchTemplate is ApplyTemplate with a snapshot that is fetched and not built.
	FetchTemplate(ctx context.Context, r sandbox.FetchRequest) (sandbox.Template, error)
	// SnapshotDigests gives a page of the digests of a layer's parts, ReadSnapshot such parts.
	SnapshotDigests(ctx context.Context, r sandbox.SnapshotRead, from uint32) ([]byte, error)
	ReadSnapshot(ctx context.Context, r sandbox.SnapshotRead, send func(number uint32, content []byte) error) error
}

// Authenticator says whose credentials a request shows. Each API finds them in its
// own way: in a header, or in what the kernel knows of a socket.
type Authenticator interface {
	Authenticate(ctx context.Context, c access.Credentials) (access.Principal, error)
}

// Auditor keeps what was done. *audit.Log is one.
type Auditor interface{ Write(audit.Event) error }

// Config is what a server of any API works with.
type Config struct {
	Service Service
	// Snapshots is what travels between nodes; nil is nothing.
	Snapshots Snapshots
	// Access makes keys and tokens, Audit keeps what is done with them.
	Access *access.Store
	Audit  Auditor
	// Authenticator says who makes a request; nil knows those of Access, and users
	// of this machine.
	Authenticator Authenticator
	// Version is the daemon's, Endpoint where others reach it.
	Version, Endpoint string
	Log               *slog.Logger
	// Readiness says whether the daemon serves; nil is always.
	Readiness *Readiness
	// Work is told what is done inside of sandboxes; nil is nobody.
	Work sandbox.Observer
	// Contexts are shared by all servers of a daemon; nil makes the server's own.
	Contexts *Contexts
	// BodyTimeout is how long a client may take to send a message or a JSON body, and
	// StallTimeout how long it may neither send nor take anything while it
	// streams. 0 are 30 seconds and a minute. The second is the longer one: an
	// answer may have to wait for what is left of a body.
	BodyTimeout, StallTimeout time.Duration
}

// WithDefaults fills in what was left open.
func (c Config) WithDefaults() Config {
	if c.Authenticator == nil {
		c.Authenticator = access.Authenticator{Store: c.Access, Sandbox: c.Service.SandboxOfToken}
	}
	if c.BodyTimeout == 0 {
		c.BodyTimeout = bodyTimeout
	}
	if c.StallTimeout == 0 {
		c.StallTimeout = stallTimeout
	}
	if c.Work == nil {
		c.Work = sandbox.Observers()
	}
	if c.Contexts == nil {
		c.Contexts = NewContexts()
	}
	if c.Readiness == nil {
		c.Readiness = &Readiness{}
		c.Readiness.Set(true)
	}
	return c
}

const (
	bodyTimeout  = 30 * time.Second
	stallTimeout = time.Minute
)

// Bounds of every request.
const (
	MaxHeader         = 64 << 10
	ReadHeaderTimeout = 10 * time.Second
	IdleTimeout       = 2 * time.Minute
	// MaxBody is the size of a JSON body or a message.
	MaxBody = 1 << 20
	// MaxIdempotencyKey is the length of the longest idempotency key.
	MaxIdempotencyKey = 255
)
