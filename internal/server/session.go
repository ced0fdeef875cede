package server

import (
	"context"
	"errors"
	"io/fs"
	"sync"

	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
)

// Session is a sandbox that a request uses. It fills in the fields that the
// request leaves out.
type Session struct {
	sandbox.Session
	observer sandbox.Observer
	contexts *Contexts
}

// Use begins to use a sandbox.
func (c *Config) Use(ctx context.Context, k sandbox.Key) (*Session, error) {
	s, err := c.Service.Use(ctx, k)
	if err != nil {
		return nil, err
	}
	if err := checkOwn(ctx, s.Record()); err != nil {
		s.Close()
		return nil, err
	}
	return &Session{s, c.Work, c.Contexts}, nil
}

// Sandbox returns the record of a sandbox.
func (c *Config) Sandbox(ctx context.Context, k sandbox.Key) (sandbox.Sandbox, error) {
	s, err := c.Service.Sandbox(ctx, k)
	if err == nil {
		err = checkOwn(ctx, s)
	}
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return s, nil
}

// checkOwn refuses a sandbox other than the token's: since the request was
// authorised, another sandbox may have got the name.
func checkOwn(ctx context.Context, s sandbox.Sandbox) error {
	if only := PrincipalOf(ctx).Sandbox; only != "" && s.ID != only {
		return sandbox.NotFound(sandbox.KindSandbox, s.Key)
	}
	return nil
}

// Begin tells the observer that an operation begins in the sandbox.
func (s *Session) Begin(ctx context.Context, op sandbox.Op) (context.Context, func(error)) {
	ctx, end := s.observer.Begin(ctx, s.Record().Work(op))
	return ctx, func(err error) { end(sandbox.Outcome{Err: err}) }
}

// Scope is the user and the workdir for access to files, unless the request has
// others.
func (s *Session) Scope() guestrpc.FileScope {
	r := s.Record()
	return guestrpc.FileScope{User: r.User, Workdir: r.Workdir}
}

// Exec starts a program. If the request has no user or workdir, it gets those
// of the sandbox. The agent already has the sandbox's environment.
func (s *Session) Exec(ctx context.Context, req guestrpc.ExecRequest) (*guestrpc.AttachedExec, error) {
	scope := s.Scope()
	if req.User == "" {
		req.User = scope.User
	}
	if req.Workdir == "" {
		req.Workdir = scope.Workdir
	}
	return s.Agent().Exec(ctx, req)
}

// DefaultContext returns the name of the context that runs code of a language if
// the request names no context. It makes the context if it is missing, with the
// sandbox's user and workdir.
func (s *Session) DefaultContext(ctx context.Context, language string) (string, error) {
	name := "default"
	if language != "" && language != "python" {
		name += "-" + language
	}
	key := contextID{s.Record().ID, name}
	if s.contexts.has(key) {
		return name, nil
	}
	scope := s.Scope()
	_, err := s.Agent().CreateContext(ctx, guestrpc.CodeCreateRequest{ID: name, Language: language, Workdir: scope.Workdir, User: scope.User})
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	s.contexts.add(key)
	return name, nil
}

// CloseContext ends the interpreter of a context and forgets the context.
func (s *Session) CloseContext(ctx context.Context, id string) error {
	s.ForgetContext(id)
	return s.Agent().CloseContext(ctx, id)
}

// ForgetContext forgets a context that is being closed.
func (s *Session) ForgetContext(id string) { s.contexts.drop(contextID{s.Record().ID, id}) }

// maxContexts bounds the contexts that are remembered. If one was forgotten, the
// agent is asked for it again.
const maxContexts = 10_000

// Contexts remembers which default contexts exist in sandboxes. The servers of
// one daemon share it, so a context that one of them closes is gone for all.
type Contexts struct {
	mu   sync.Mutex // protects seen
	seen map[contextID]bool
}

// contextID names a context of a sandbox.
type contextID struct {
	sandbox sandbox.ID
	name    string
}

// NewContexts returns an empty Contexts.
func NewContexts() *Contexts { return &Contexts{seen: map[contextID]bool{}} }

func (c *Contexts) has(key contextID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seen[key]
}

func (c *Contexts) add(key contextID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.seen) >= maxContexts {
		clear(c.seen)
	}
	c.seen[key] = true
}

func (c *Contexts) drop(key contextID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.seen, key)
}
