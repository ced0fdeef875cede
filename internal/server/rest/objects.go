package rest

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// object serves a route that looks at one object, or deletes it.
func object[T any](a *api, w http.ResponseWriter, r *http.Request, namespace, name string, get func(context.Context, sandbox.Key) (T, error)) {
	k, err := sandbox.ParseKey(namespace, name)
	var found T
	if err == nil {
		found, err = get(r.Context(), k)
	}
	a.answer(w, r, http.StatusOK, found, err)
}

// shown is get, but returns the object as clients see it.
func shown[T, R any](get func(context.Context, sandbox.Key) (T, error), show func(T) R) func(context.Context, sandbox.Key) (R, error) {
	return func(ctx context.Context, k sandbox.Key) (R, error) {
		v, err := get(ctx, k)
		return show(v), err
	}
}

// remove serves a route that deletes an object, if the object meets a
// precondition.
func remove(a *api, w http.ResponseWriter, r *http.Request, namespace, name string, del func(context.Context, sandbox.Key, ...sandbox.Precondition) error) {
	k, err := sandbox.ParseKey(namespace, name)
	var when sandbox.Precondition
	if err == nil {
		when, err = meant(r)
	}
	if err == nil {
		err = del(r.Context(), k, when)
	}
	a.done(w, r, err)
}

// meant returns the precondition in the query of a request.
func meant(r *http.Request) (p sandbox.Precondition, err error) {
	if q := r.URL.Query(); q.Has("id") {
		p.ID, err = sandbox.ParseID(q.Get("id"))
	}
	return p, err
}

// listing serves a route that lists objects.
func listing[T, R any](a *api, w http.ResponseWriter, r *http.Request, namespace string, limit *int, after string,
	find func(context.Context, sandbox.Namespace, sandbox.Page) ([]T, error), position func(T) string, show func(context.Context, T) (R, error),
) {
	p, err := server.Page(limit, after)
	var n sandbox.Namespace
	if err == nil {
		n, err = sandbox.ParseNamespace(namespace)
	}
	var list page
	var v sandbox.StateVersion
	if err == nil {
		v, err = a.Service.Version(r.Context())
	}
	if err == nil {
		encode := func(ctx context.Context, one T) (json.RawMessage, error) {
			shown, err := show(ctx, one)
			if err != nil {
				return nil, err
			}
			return json.Marshal(shown)
		}
		list.Items, list.Next, err = server.List(r.Context(), n, p, find, position, encode, func(m json.RawMessage) int { return len(m) })
	}
	if versioned[T]() {
		list.ResourceVersion = restconv.FromPosition(v)
	}
	a.answer(w, r, http.StatusOK, list, err)
}

// versioned reports whether objects of a type are listed with a resource version: secrets
// and costs are not watched.
func versioned[T any]() bool {
	switch any(*new(T)).(type) {
	case sandbox.Secret, sandbox.Cost, sandbox.Image, sandbox.RegistryLogin:
		return false
	}
	return true
}

// page is the form of all lists that are read in pages. Its items are encoded one by
// one, because their size decides where the page ends.
type page struct {
	Items []json.RawMessage `json:"items"`
	Next  string            `json:"next,omitempty"`
	// ResourceVersion is the version before the list was read, for objects that are
	// watched.
	ResourceVersion string `json:"resourceVersion,omitempty"`
}

// showTemplate adds the state of the builds to a template.
func (a *api) showTemplate(ctx context.Context, t sandbox.Template) (rest.Template, error) {
	builds, err := a.Service.Builds(ctx, t)
	if err != nil {
		return rest.Template{}, err
	}
	return restconv.FromTemplate(t, builds), nil
}

// ListTemplates implements rest.ServerInterface.
func (a *api) ListTemplates(w http.ResponseWriter, r *http.Request, namespace string, q rest.ListTemplatesParams) {
	if q.Watch {
		a.watch(w, r, watching{namespace, sandbox.KindTemplate, q.ResourceVersion, q.LastEventID, q.Limit != nil || q.After != ""})
		return
	}
	if q.ResourceVersion != "" {
		a.fail(w, r, errNoWatch())
		return
	}
	listing(a, w, r, namespace, q.Limit, q.After, a.Service.Templates,
		func(t sandbox.Template) string { return string(t.Name) }, a.showTemplate)
}

// GetTemplate implements rest.ServerInterface.
func (a *api) GetTemplate(w http.ResponseWriter, r *http.Request, namespace, name string) {
	object(a, w, r, namespace, name, func(ctx context.Context, k sandbox.Key) (rest.Template, error) {
		t, err := a.Service.Template(ctx, k)
		if err != nil {
			return rest.Template{}, err
		}
		return a.showTemplate(ctx, t)
	})
}

// PutTemplate implements rest.ServerInterface.
func (a *api) PutTemplate(w http.ResponseWriter, r *http.Request, namespace, name string) {
	object(a, w, r, namespace, name, func(ctx context.Context, k sandbox.Key) (rest.Template, error) {
		var given rest.TemplateSpec
		if _, err := a.readJSON(w, r, 8*server.MaxBody, &given); err != nil {
			return rest.Template{}, err
		}
		spec, err := restconv.ToTemplateSpec(given)
		if err != nil {
			return rest.Template{}, err
		}
		t, err := a.Service.ApplyTemplate(ctx, k, spec)
		if err != nil {
			return rest.Template{}, err
		}
		return a.showTemplate(ctx, t)
	})
}

// DeleteTemplate implements rest.ServerInterface.
func (a *api) DeleteTemplate(w http.ResponseWriter, r *http.Request, namespace, name string) {
	remove(a, w, r, namespace, name, a.Service.DeleteTemplate)
}

// GetTemplateLog implements rest.ServerInterface.
func (a *api) GetTemplateLog(w http.ResponseWriter, r *http.Request, namespace, name string, q rest.GetTemplateLogParams) {
	k, err := sandbox.ParseKey(namespace, name)
	stage, offset := sandbox.AfterReady, int64(0)
	if q.Offset != nil {
		offset = *q.Offset
	}
	if q.Stage != "" {
		stage = sandbox.Stage(q.Stage)
	}
	if err != nil {
		a.fail(w, r, err)
		return
	}
	out := &flowing{api: a, w: w, kind: "text/plain; charset=utf-8"}
	err = a.Service.CopyBuildLog(r.Context(), sandbox.BuildLogRequest{
		Key: k, Stage: stage, Follow: q.Follow == nil || *q.Follow, Offset: offset, Tail: q.Tail,
		Begun: func(size int64) { w.Header().Set("Log-Size", strconv.FormatInt(size, 10)) },
	}, out)
	if err != nil {
		a.fail(w, r, err)
		return
	}
	out.begin() // of an empty log
}

func (a *api) showPool(ctx context.Context, k sandbox.Key) (rest.Pool, error) {
	p, status, err := a.Service.Pool(ctx, k)
	return restconv.FromPool(p, status), err
}

// ListPools implements rest.ServerInterface.
func (a *api) ListPools(w http.ResponseWriter, r *http.Request, namespace string, q rest.ListPoolsParams) {
	if q.Watch {
		a.watch(w, r, watching{namespace, sandbox.KindPool, q.ResourceVersion, q.LastEventID, q.Limit != nil || q.After != ""})
		return
	}
	if q.ResourceVersion != "" {
		a.fail(w, r, errNoWatch())
		return
	}
	listing(a, w, r, namespace, q.Limit, q.After, a.Service.Pools,
		func(p sandbox.Pool) string { return string(p.Name) },
		func(ctx context.Context, p sandbox.Pool) (rest.Pool, error) { return a.showPool(ctx, p.Key) })
}

// GetPool implements rest.ServerInterface.
func (a *api) GetPool(w http.ResponseWriter, r *http.Request, namespace, name string) {
	object(a, w, r, namespace, name, a.showPool)
}

// PutPool implements rest.ServerInterface.
func (a *api) PutPool(w http.ResponseWriter, r *http.Request, namespace, name string) {
	object(a, w, r, namespace, name, func(ctx context.Context, k sandbox.Key) (rest.Pool, error) {
		var given rest.PoolSpec
		if _, err := a.readJSON(w, r, server.MaxBody, &given); err != nil {
			return rest.Pool{}, err
		}
		spec, err := restconv.ToPoolSpec(given)
		if err != nil {
			return rest.Pool{}, err
		}
		if _, err := a.Service.ApplyPool(ctx, k, spec); err != nil {
			return rest.Pool{}, err
		}
		return a.showPool(ctx, k)
	})
}

// DeletePool implements rest.ServerInterface.
func (a *api) DeletePool(w http.ResponseWriter, r *http.Request, namespace, name string) {
	remove(a, w, r, namespace, name, a.Service.DeletePool)
}

// ListForks implements rest.ServerInterface.
func (a *api) ListForks(w http.ResponseWriter, r *http.Request, namespace string, q rest.ListForksParams) {
	listing(a, w, r, namespace, q.Limit, q.After, a.Service.Forks,
		func(f sandbox.Fork) string { return string(f.Name) },
		server.Plain(restconv.FromFork))
}

// GetFork implements rest.ServerInterface.
func (a *api) GetFork(w http.ResponseWriter, r *http.Request, namespace, name string) {
	object(a, w, r, namespace, name, shown(a.Service.ForkOf, restconv.FromFork))
}

// DeleteFork implements rest.ServerInterface.
func (a *api) DeleteFork(w http.ResponseWriter, r *http.Request, namespace, name string) {
	remove(a, w, r, namespace, name, a.Service.DeleteFork)
}

// making has the common parts of requests that make an object from another one: that
// other object, the key of the new one, the identity of the request, and its
// precondition.
type making struct {
	from, key sandbox.Key
	once      *sandbox.Once
	when      sandbox.Precondition
}

// readMaking reads such a request. name is the field of given with the new object's
// name.
func (a *api) readMaking(w http.ResponseWriter, r *http.Request, namespace, from string, given any, name *string) (m making, err error) {
	if m.from, err = sandbox.ParseKey(namespace, from); err != nil {
		return m, err
	}
	body, err := a.readJSON(w, r, server.MaxBody, given)
	if err != nil {
		return m, err
	}
	if m.key, err = server.Named(m.from, *name); err != nil {
		return m, err
	}
	if m.when, err = meant(r); err != nil {
		return m, err
	}
	m.once, err = idempotent(r, body)
	return m, err
}

// ForkSandbox implements rest.ServerInterface.
func (a *api) ForkSandbox(w http.ResponseWriter, r *http.Request, namespace, name string, q rest.ForkSandboxParams) {
	f, err := func() (f sandbox.Fork, err error) {
		var given rest.ForkCreate
		m, err := a.readMaking(w, r, namespace, name, &given, &given.Name)
		if err != nil {
			return f, err
		}
		spec, err := restconv.ToForkSpec(m.from.Name, given)
		if err != nil {
			return f, err
		}
		f, replayed, err := a.Service.Fork(r.Context(), sandbox.ForkRequest{Key: m.key, Spec: spec, Once: m.once, When: m.when})
		noteReplay(w, replayed)
		return f, err
	}()
	shown := restconv.FromFork(f)
	if err == nil {
		made(r, "forks/"+string(f.Name))
		for i, c := range f.Children {
			if c.ID != "" {
				shown.Children[i].Token = a.Access.Token(c.ID)
			}
		}
	}
	a.answer(w, r, http.StatusCreated, shown, err)
}

// idempotent returns the identity of a request that has an idempotency key.
func idempotent(r *http.Request, body []byte) (*sandbox.Once, error) {
	given, ok := r.Header["Idempotency-Key"]
	if !ok {
		return nil, nil
	}
	if len(given) != 1 || given[0] == "" || len(given[0]) > server.MaxIdempotencyKey {
		return nil, sandbox.Invalid("Idempotency-Key", "it has 1 to %d characters, and is given once", server.MaxIdempotencyKey)
	}
	once := sandbox.NewOnce(server.PrincipalOf(r.Context()).Name, r.Method+" "+r.URL.Path, given[0], body)
	return &once, nil
}

func noteReplay(w http.ResponseWriter, replayed bool) {
	if replayed {
		w.Header().Set("Idempotency-Replayed", "true")
	}
}

// sandboxVerb serves a route that changes the state of a sandbox, if the sandbox meets a
// precondition.
func (a *api) sandboxVerb(w http.ResponseWriter, r *http.Request, namespace, name string, do func(context.Context, sandbox.Key, ...sandbox.Precondition) (sandbox.Sandbox, error)) {
	object(a, w, r, namespace, name, func(ctx context.Context, k sandbox.Key) (rest.Sandbox, error) {
		when, err := meant(r)
		if err != nil {
			return rest.Sandbox{}, err
		}
		s, err := do(ctx, k, when)
		return restconv.FromSandbox(s), err
	})
}
