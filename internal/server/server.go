// Package server serves the REST API of a node: api/openapi.yaml over whatever
// implements Service. Everything a client sends is hostile until it is parsed.
package server

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"path"
	"regexp"
	"runtime/debug"
	"strings"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/sandbox"
)

// Service is what is served. *node.Manager implements it. The context of each call
// says who makes it (sandbox.PrincipalOf). A request with an identity (sandbox.Once)
// that was done before has the same answer again, and replayed says so.
type Service interface {
	ApplyTemplate(ctx context.Context, k sandbox.Key, spec sandbox.TemplateSpec) (sandbox.Template, error)
	Template(ctx context.Context, k sandbox.Key) (sandbox.Template, error)
	Templates(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Template, error)
	Builds(ctx context.Context, t sandbox.Template) ([]sandbox.Build, error)
	CopyBuildLog(ctx context.Context, r sandbox.BuildLogRequest, w io.Writer) error
	DeleteTemplate(ctx context.Context, k sandbox.Key) error

	ApplyPool(ctx context.Context, k sandbox.Key, spec sandbox.PoolSpec) (sandbox.Pool, error)
	Pool(ctx context.Context, k sandbox.Key) (sandbox.Pool, sandbox.PoolStatus, error)
	Pools(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Pool, error)
	DeletePool(ctx context.Context, k sandbox.Key) error

	Claim(ctx context.Context, r sandbox.ClaimRequest) (s sandbox.Sandbox, replayed bool, err error)
	Sandbox(ctx context.Context, k sandbox.Key) (sandbox.Sandbox, error)
	SandboxByID(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error)
	Sandboxes(ctx context.Context, r sandbox.SandboxesRequest) ([]sandbox.Sandbox, error)
	Pause(ctx context.Context, k sandbox.Key) (sandbox.Sandbox, error)
	Resume(ctx context.Context, k sandbox.Key) (sandbox.Sandbox, error)
	Hibernate(ctx context.Context, k sandbox.Key) (sandbox.Sandbox, error)
	Extend(ctx context.Context, k sandbox.Key, timeout time.Duration) (sandbox.Sandbox, error)
	Kill(ctx context.Context, k sandbox.Key) (sandbox.Sandbox, error)
	Use(ctx context.Context, k sandbox.Key) (sandbox.Session, error)

	Fork(ctx context.Context, r sandbox.ForkRequest) (f sandbox.Fork, replayed bool, err error)
	ForkOf(ctx context.Context, k sandbox.Key) (sandbox.Fork, error)
	Forks(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Fork, error)
	DeleteFork(ctx context.Context, k sandbox.Key) error

	ApplySecret(ctx context.Context, k sandbox.Key, data sandbox.SecretData) (sandbox.Secret, error)
	SetSecret(ctx context.Context, k sandbox.Key, data sandbox.SecretData) (sandbox.Secret, error)
	Secret(ctx context.Context, k sandbox.Key) (sandbox.Secret, error)
	Secrets(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Secret, error)
	DeleteSecret(ctx context.Context, k sandbox.Key) error

	SetQuota(ctx context.Context, q sandbox.Quota) (sandbox.QuotaUse, error)
	QuotaOf(ctx context.Context, n sandbox.Namespace) (sandbox.QuotaUse, error)

	Checkpoint(ctx context.Context, r sandbox.CheckpointRequest) (c sandbox.CheckpointSize, replayed bool, err error)
	CheckpointOf(ctx context.Context, k sandbox.Key) (sandbox.CheckpointSize, error)
	Checkpoints(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.CheckpointSize, error)
	DeleteCheckpoint(ctx context.Context, k sandbox.Key) error
	Restore(ctx context.Context, r sandbox.RestoreRequest) (s sandbox.Sandbox, replayed bool, err error)

	Cost(ctx context.Context, k sandbox.Key) (sandbox.Cost, error)
	Costs(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Cost, error)
	Node(ctx context.Context) (sandbox.NodeStatus, error)
	Watch(ctx context.Context, n sandbox.Namespace, each func(sandbox.Sandbox) error, synced func() error) error
}

// Config is what a server works with.
type Config struct {
	Service Service
	// Access makes keys and tokens, Audit keeps what is done with them.
	Access *access.Store
	Audit  Auditor
	// Authenticator says who makes a request; nil knows those of Access, and users
	// of this machine.
	Authenticator Authenticator
	// Version is the daemon's, Endpoint where others reach it.
	Version, Endpoint string
	Log               *slog.Logger
	// Observer is told of every request; nil is nobody.
	Observer Observer
	// Work is told what is done inside of sandboxes; nil is nobody.
	Work sandbox.Observer
	// Domain is that of the host names by which ports of sandboxes are reached,
	// PORT-ID.DOMAIN; empty has none.
	Domain string
	// Terminals are the tokens of terminals, shared by all servers of a daemon;
	// nil makes a store of the server's own. Pages of AllowOrigins may use them,
	// beside those of the server itself.
	Terminals    *Terminals
	AllowOrigins []string
	// Contexts are shared as Terminals are.
	Contexts *Contexts
	// Metrics answers /metrics; nil has none.
	Metrics http.Handler
	// BodyTimeout is how long a client may take to send a JSON body, and
	// StallTimeout how long it may neither send nor take anything while it
	// streams. 0 are 30 seconds and a minute. The second is the longer one: an
	// answer may have to wait for what is left of a body.
	BodyTimeout, StallTimeout time.Duration
}

// withDefaults fills in what was left open.
func (c Config) withDefaults() Config {
	if c.Authenticator == nil {
		c.Authenticator = access.Authenticator{Store: c.Access, Sandbox: c.Service.SandboxByID}
	}
	if c.BodyTimeout == 0 {
		c.BodyTimeout = bodyTimeout
	}
	if c.StallTimeout == 0 {
		c.StallTimeout = stallTimeout
	}
	if c.Observer == nil {
		c.Observer = Observers()
	}
	if c.Work == nil {
		c.Work = sandbox.Observers()
	}
	if c.Contexts == nil {
		c.Contexts = NewContexts()
	}
	if c.Terminals == nil {
		c.Terminals = NewTerminals()
	}
	return c
}

// Bounds of every request.
const (
	maxHeader         = 64 << 10
	readHeaderTimeout = 10 * time.Second
	idleTimeout       = 2 * time.Minute
	bodyTimeout       = 30 * time.Second
	stallTimeout      = time.Minute
)

// api implements the routes.
type api struct {
	Config
	strangers throttle
}

var _ rest.ServerInterface = (*api)(nil)

// New makes the handler of all routes.
func New(cfg Config) http.Handler {
	a := &api{Config: cfg.withDefaults()}
	mux := http.NewServeMux()
	rest.HandlerWithOptions(a, rest.StdHTTPServerOptions{
		BaseRouter: mux,
		ErrorHandlerFunc: func(w http.ResponseWriter, r *http.Request, err error) {
			a.fail(w, r, sandbox.Errorf(sandbox.CodeInvalid, "%v", err))
		},
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { a.serve(mux, w, r) })
}

// HTTP makes the server for a handler, with the bounds that it needs. The
// caller serves with it, and ends it.
func HTTP(h http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: readHeaderTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		ConnContext:       withPeer,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}

// contextKey keys what a request carries.
type contextKey int

const (
	principalKey contextKey = iota
	peerKey
	recordKey
	patienceKey
	ticketKey
)

func principalOf(r *http.Request) access.Principal { return principalIn(r.Context()) }

func principalIn(ctx context.Context) access.Principal {
	p, _ := ctx.Value(principalKey).(access.Principal)
	return p
}

var requestID = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// serve is around every request: id, logs, panics, who it is, what it may, where
// it goes.
func (a *api) serve(mux *http.ServeMux, w http.ResponseWriter, r *http.Request) {
	id := r.Header.Get("X-Request-Id")
	if !requestID.MatchString(id) {
		id = rand.Text()
	}
	w.Header().Set("X-Request-Id", id)
	rec := &recorder{ResponseWriter: w}
	start := time.Now()
	ctx, answered := a.Observer.Request(r)
	r = r.WithContext(ctx)
	to, err := a.portTarget(r)
	_, pattern := mux.Handler(r)
	about := findTarget(pattern, r.URL.Path)
	if to != nil {
		about = to.about()
	}
	audited := newRecord(r, id, about)
	defer func() {
		p := recover()
		err, _ := p.(error)
		if p != nil && !errors.Is(err, http.ErrAbortHandler) {
			a.Log.Error("a request has panicked", "request", id, "panic", p, "stack", string(debug.Stack()))
		}
		switch {
		case p == nil:
		case began(rec):
			rec.status = statusCutOff
		default:
			a.fail(rec, r, sandbox.Errorf(sandbox.CodeInternal, "the daemon has a defect").Try("Report it with the request id %s", id))
		}
		// Neither the query nor a header: paths and tokens are the client's matter.
		a.Log.Info("request", "request", id, "principal", audited.event.Principal, "method", r.Method, "path", r.URL.Path,
			"status", rec.status, "bytes", rec.bytes, "duration", time.Since(start))
		a.end(audited, rec.status)
		answered(rec.answer(r.Method))
		if rec.status == statusCutOff {
			panic(http.ErrAbortHandler)
		}
	}()
	who, ctx, authErr := a.whoAsks(r, pattern, to)
	audited.event.Principal = who.Name
	if authErr != nil {
		err = authErr // who is nobody does not learn what else is wrong
	}
	if err != nil {
		audited.denied = true
		a.fail(rec, r, err)
		return
	}
	ctx, cancel := whileValid(sandbox.WithPrincipal(ctx, sandbox.Principal(who.Name)), who)
	defer cancel()
	r = r.WithContext(context.WithValue(ctx, recordKey, audited))
	if to != nil {
		rec.route, err = portsRoute, a.authorisePort(r.Context(), who, to, &about)
		audited.event.Namespace, audited.event.Object = trimmed(about.namespace), trimmedTo(about.object, maxObject)
	} else if rec.route, err = checkURL(mux, pattern, r); err == nil {
		err = a.authorise(r.Context(), who, about)
	} else {
		a.fail(rec, r, err)
		return
	}
	if err != nil {
		audited.denied = true
		a.fail(rec, r, err)
		return
	}
	if err := a.begin(audited, about); err != nil {
		a.fail(rec, r, err)
		return
	}
	if to != nil {
		a.servePort(rec, r, to)
		return
	}
	mux.ServeHTTP(rec, r)
}

// statusCutOff is logged for a response that could not be completed.
const statusCutOff = 599

// checkURL refuses what has no route, and what only has one in another form.
func checkURL(mux *http.ServeMux, pattern string, r *http.Request) (route string, err error) {
	// Names and ids need no escapes, so nothing can hide in one.
	if r.URL.Path != r.URL.EscapedPath() || path.Clean(r.URL.Path) != r.URL.Path {
		return "", sandbox.Errorf(sandbox.CodeInvalid, "the path of the URL is not valid").
			Because("it has escapes, empty or relative parts").Try("Paths of files go into the query, as `path`")
	}
	if pattern == "" {
		for _, method := range []string{http.MethodGet, http.MethodPut, http.MethodPost, http.MethodPatch, http.MethodDelete} {
			other := *r
			other.Method = method
			if _, pattern := mux.Handler(&other); pattern != "" {
				return pattern, sandbox.Errorf(codeMethod, "%s is not something that can be done with %s", r.Method, r.URL.Path)
			}
		}
		return "", sandbox.Errorf(sandbox.CodeNotFound, "there is nothing at %s", r.URL.Path).Try("api/openapi.yaml lists all routes")
	}
	return pattern, checkQuery(pattern, r.URL.RawQuery)
}

// recorder remembers what was answered.
type recorder struct {
	http.ResponseWriter
	status int
	bytes  int64
	route  string       // empty if there is none
	code   sandbox.Code // of an error
}

func (w *recorder) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *recorder) Write(p []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	n, err := w.ResponseWriter.Write(p)
	w.bytes += int64(n)
	return n, err
}

// Unwrap is for http.ResponseController.
func (w *recorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// began reports whether an answer is under way.
func began(w http.ResponseWriter) bool {
	rec, ok := w.(*recorder)
	return ok && rec.status != 0
}

// GetVersion implements rest.ServerInterface.
func (a *api) GetVersion(w http.ResponseWriter, r *http.Request) {
	a.answer(w, r, http.StatusOK, rest.Version{Version: a.Version, Endpoint: a.Endpoint, Api: rest.VersionApiV1}, nil)
}

// GetMetrics implements rest.ServerInterface.
func (a *api) GetMetrics(w http.ResponseWriter, r *http.Request) {
	if a.Metrics == nil {
		a.fail(w, r, sandbox.Errorf(sandbox.CodeUnimplemented, "this server has no metrics"))
		return
	}
	a.Metrics.ServeHTTP(w, r)
}

// trimmed shortens untrusted text in an error.
func trimmed(s string) string { return trimmedTo(s, 80) }

func trimmedTo(s string, most int) string {
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strings.ToValidUTF8(s, "?")
}
