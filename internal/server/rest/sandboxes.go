package rest

import (
	"context"
	"net/http"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// ListSandboxes implements rest.ServerInterface.
func (a *api) ListSandboxes(w http.ResponseWriter, r *http.Request, namespace string, q rest.ListSandboxesParams) {
	if q.Watch {
		a.watch(w, r, watching{namespace, sandbox.KindSandbox, q.ResourceVersion, q.LastEventID, q.Limit != nil || q.After != "" || q.Ended})
		return
	}
	if q.ResourceVersion != "" {
		a.fail(w, r, errNoWatch())
		return
	}
	listing(a, w, r, namespace, q.Limit, q.After,
		func(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Sandbox, error) {
			return a.Service.Sandboxes(ctx, sandbox.SandboxesRequest{Namespace: n, Page: p, Ended: q.Ended})
		},
		sandbox.Sandbox.Position,
		server.Plain(restconv.FromSandbox))
}

// CreateSandbox implements rest.ServerInterface.
func (a *api) CreateSandbox(w http.ResponseWriter, r *http.Request, namespace string, _ rest.CreateSandboxParams) {
	s, err := func() (s sandbox.Sandbox, err error) {
		n, err := sandbox.ParseNamespace(namespace)
		if err != nil {
			return s, err
		}
		var given rest.SandboxCreate
		body, err := a.readJSON(w, r, server.MaxBody, &given)
		if err != nil {
			return s, err
		}
		spec, err := restconv.ToClaimSpec(given)
		if err != nil {
			return s, err
		}
		k, err := server.Named(sandbox.Key{Namespace: n, Name: spec.Pool}, given.Name)
		if err != nil {
			return s, err
		}
		once, err := idempotent(r, body)
		if err != nil {
			return s, err
		}
		s, replayed, err := a.Service.Claim(r.Context(), sandbox.ClaimRequest{Key: k, Spec: spec, Once: once})
		noteReplay(w, replayed)
		return s, err
	}()
	a.answerMade(w, r, s, err)
}

// answerMade answers with a sandbox that was made, and with its token.
func (a *api) answerMade(w http.ResponseWriter, r *http.Request, s sandbox.Sandbox, err error) {
	shown := restconv.FromSandbox(s)
	if err == nil {
		if s.Token == "" {
			shown.Token = a.Access.Token(s.ID)
		}
		made(r, "sandboxes/"+string(s.Name))
	}
	a.answer(w, r, http.StatusCreated, shown, err)
}

// GetSandbox implements rest.ServerInterface.
func (a *api) GetSandbox(w http.ResponseWriter, r *http.Request, namespace, name string) {
	object(a, w, r, namespace, name, shown(a.Sandbox, restconv.FromSandbox))
}

// DeleteSandbox implements rest.ServerInterface.
func (a *api) DeleteSandbox(w http.ResponseWriter, r *http.Request, namespace, name string, _ rest.DeleteSandboxParams) {
	a.sandboxVerb(w, r, namespace, name, a.Service.Kill)
}

// PauseSandbox implements rest.ServerInterface.
func (a *api) PauseSandbox(w http.ResponseWriter, r *http.Request, namespace, name string, _ rest.PauseSandboxParams) {
	a.sandboxVerb(w, r, namespace, name, a.Service.Pause)
}

// ResumeSandbox implements rest.ServerInterface.
func (a *api) ResumeSandbox(w http.ResponseWriter, r *http.Request, namespace, name string, _ rest.ResumeSandboxParams) {
	a.sandboxVerb(w, r, namespace, name, a.Service.Resume)
}

// HibernateSandbox implements rest.ServerInterface.
func (a *api) HibernateSandbox(w http.ResponseWriter, r *http.Request, namespace, name string, _ rest.HibernateSandboxParams) {
	a.sandboxVerb(w, r, namespace, name, a.Service.Hibernate)
}

// ExtendSandbox implements rest.ServerInterface.
func (a *api) ExtendSandbox(w http.ResponseWriter, r *http.Request, namespace, name string, _ rest.ExtendSandboxParams) {
	a.sandboxVerb(w, r, namespace, name, func(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
		var given rest.Extend
		if _, err := a.readJSON(w, r, server.MaxBody, &given); err != nil {
			return sandbox.Sandbox{}, err
		}
		if (given.Timeout == "") == (given.Expires == nil) {
			return sandbox.Sandbox{}, sandbox.Invalid("timeout", "either it or expires must be there; a timeout of 0s is none")
		}
		if given.Expires != nil {
			return a.Service.SetExpiry(ctx, k, *given.Expires, when...)
		}
		timeout, err := restconv.ToDuration("timeout", given.Timeout)
		if err != nil {
			return sandbox.Sandbox{}, err
		}
		return a.Service.Extend(ctx, k, timeout, when...)
	})
}
