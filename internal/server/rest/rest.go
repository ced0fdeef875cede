// Package rest serves the REST API of a node: api/openapi.yaml over any
// server.Service, the ports of sandboxes, and their terminals. All input of clients
// is hostile until it is parsed.
package rest

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"net/http"
	"path"
	"regexp"
	"runtime/debug"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// Config is the configuration of a server.
type Config struct {
	server.Config
	// Observer observes every request; it may be nil.
	Observer Observer
	// Domain is the domain of the host names by which ports of sandboxes are
	// reached, PORT-ID.DOMAIN. If it is empty, ports have no host names.
	Domain string
	// Terminals has the tokens of terminals, shared by all servers of a daemon.
	// With nil the server makes a store of its own. Pages of AllowOrigins may
	// use the tokens, beside those of the server itself.
	Terminals    *Terminals
	AllowOrigins []string
	// Metrics answers /metrics; with nil the server has no metrics.
	Metrics http.Handler
}

// api implements the routes.
type api struct {
	Config
	refusals server.Throttles
}

var _ rest.ServerInterface = (*api)(nil)

// New makes the handler of all routes.
func New(cfg Config) http.Handler {
	cfg.Config = cfg.WithDefaults()
	if cfg.Observer == nil {
		cfg.Observer = Observers()
	}
	if cfg.Terminals == nil {
		cfg.Terminals = NewTerminals()
	}
	a := &api{Config: cfg}
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
		ReadHeaderTimeout: server.ReadHeaderTimeout,
		IdleTimeout:       server.IdleTimeout,
		MaxHeaderBytes:    server.MaxHeader,
		ConnContext:       withPeer,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}

// contextKey is a key of values in a request's context.
type contextKey int

const (
	peerKey contextKey = iota
	recordKey
	ticketKey
)

var requestID = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// serve wraps every request: it gives it an id, writes the logs, recovers from
// panics, finds the principal, authorises the request and routes it.
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
		// The query and the headers are left out: their paths and tokens are the
		// client's matter.
		a.Log.Info("request", "request", id, "principal", audited.event.Principal, "method", r.Method, "path", r.URL.Path,
			"status", rec.status, "bytes", rec.bytes, "duration", time.Since(start))
		a.end(audited, rec.status)
		answered(rec.answer(r.Method))
		if rec.status == statusCutOff {
			panic(http.ErrAbortHandler)
		}
	}()
	who, ctx, authErr := a.authenticateRoute(r, pattern, to)
	audited.event.Principal, audited.event.Essential = who.Name, who.May(access.Administer)
	if authErr != nil {
		err = authErr // an unknown client does not learn what else is wrong
	}
	if err != nil {
		audited.denied = true
		a.fail(rec, r, err)
		return
	}
	ctx, cancel := server.WithPrincipal(ctx, who)
	defer cancel()
	r = r.WithContext(context.WithValue(ctx, recordKey, audited))
	if to != nil {
		rec.route, err = portsRoute, a.authorisePort(r.Context(), who, to, &about)
		audited.event.Namespace, audited.event.Object = server.Trimmed(about.Namespace), server.TrimmedTo(about.object, server.MaxObject)
	} else if rec.route, err = checkURL(mux, pattern, r); err == nil {
		err = a.Authorise(r.Context(), who, about.Target)
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

// checkURL refuses a URL that has no route, or that has a route only in another
// form.
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
				return pattern, sandbox.Errorf(server.CodeMethod, "%s is not something that can be done with %s", r.Method, r.URL.Path)
			}
		}
		return "", sandbox.Errorf(sandbox.CodeNotFound, "there is nothing at %s", r.URL.Path).Try("api/openapi.yaml lists all routes")
	}
	return pattern, checkQuery(pattern, r.URL.RawQuery)
}

// recorder remembers the answer to a request.
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
