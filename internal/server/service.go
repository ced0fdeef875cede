// Package server has the parts that all APIs of a node share: the service that they
// serve, the rights to use it, the audit of requests, and the codes of errors. Each
// API is a package of its own below.
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

// Service is the service that all APIs serve. *node.Manager implements it. The context of each
// call names the principal that makes it (sandbox.PrincipalOf). A request with an identity
// (sandbox.Once) that was served before gets the same answer again, with replayed set. A
// method with preconditions leaves an object alone unless the object meets all of them. A call
// may give at most one owner; the context also says whether the principal may give one
// (sandbox.MayOwn).
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
	// SandboxOfToken also returns a context that ends when the token is
	// replaced.
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

// Snapshots serves snapshots that travel between nodes. *node.Manager implements it.
type Snapshots interface {
	// SnapshotOffer returns the offer that another node needs to fetch a template's snapshot,
	// by its digest.
	SnapshotOffer(ctx context.Context, digest string) (sandbox.Offer, error)
	// FetchTemplate is ApplyTemplate with a snapshot that is fetched instead of
	// built.
	FetchTemplate(ctx context.Context, r sandbox.FetchRequest) (sandbox.Template, error)
	// SnapshotDigests returns a page of the digests of a layer's parts. ReadSnapshot sends
	// such parts.
	SnapshotDigests(ctx context.Context, r sandbox.SnapshotRead, from uint32) ([]byte, error)
	ReadSnapshot(ctx context.Context, r sandbox.SnapshotRead, send func(number uint32, content []byte) error) error
}

// Authenticator finds the principal of a request's credentials. Each API finds the
// credentials in its own way: in a header, or by asking the kernel about a socket.
type Authenticator interface {
	Authenticate(ctx context.Context, c access.Credentials) (access.Principal, error)
}

// Auditor records requests. *audit.Log implements it.
type Auditor interface{ Write(audit.Event) error }

// Config is the configuration of a server of any API.
type Config struct {
	Service Service
	// Snapshots serves snapshots to other nodes; nil serves no snapshots.
	Snapshots Snapshots
	// Access makes keys and tokens, Audit records their use.
	Access *access.Store
	Audit  Auditor
	// Authenticator finds the principal of a request. With nil the server accepts
	// the credentials of Access, and users of this machine.
	Authenticator Authenticator
	// Version is the daemon's version, Endpoint the address at which others
	// reach it.
	Version, Endpoint string
	Log               *slog.Logger
	// Readiness says whether the daemon serves; nil means always.
	Readiness *Readiness
	// Work observes the operations inside of sandboxes; it may be nil.
	Work sandbox.Observer
	// Contexts are shared by all servers of a daemon; nil makes the server's own.
	Contexts *Contexts
	// BodyTimeout is how long a client may take to send a message or a JSON body.
	// StallTimeout is how long it may neither send nor receive during a stream. 0
	// means 30 seconds and a minute. StallTimeout is the longer one, because an
	// answer may have to wait for the rest of a body.
	BodyTimeout, StallTimeout time.Duration
}

// WithDefaults fills in the fields that were left out.
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
