package rest

import (
	"net/http"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// watching has the parameters of a request for a watch.
type watching struct {
	namespace     string
	kind          sandbox.Kind
	version, last string // resourceVersion and Last-Event-ID
	// paged says that the request asks for a page as well.
	paged bool
}

// errNoWatch refuses a parameter that has no use for a page.
func errNoWatch() error {
	return sandbox.Invalid("resourceVersion", "it is there, and watch is not set")
}

// watch answers with events until the client or the daemon goes.
func (a *api) watch(w http.ResponseWriter, r *http.Request, of watching) {
	form, err := accepted(r, formSSE, formNDJSON)
	ask := sandbox.WatchRequest{Kinds: []sandbox.Kind{of.kind}}
	if err == nil && of.paged {
		err = sandbox.Invalid("watch", "a watch has no pages: leave limit, after and ended out")
	}
	if err == nil && of.kind != sandbox.KindNode {
		ask.Namespace, err = sandbox.ParseNamespace(of.namespace)
	}
	field, text := "resourceVersion", of.version
	if of.last != "" {
		field, text = "Last-Event-ID", of.last
	}
	if err == nil {
		err = server.CheckText(field, text)
	}
	var from, now sandbox.StateVersion
	if err == nil {
		from, err = restconv.ToPosition(field, text)
	}
	if err == nil {
		now, err = a.Service.Version(r.Context())
	}
	if err != nil {
		a.fail(w, r, err)
		return
	}
	ask.From, ask.State = from.Version, from.ID
	e := a.newEvents(w, form)
	synced := ask.From > 0 // events before EventSynced have no id: a client cannot go on from them
	err = a.Service.Watch(r.Context(), ask, func(one sandbox.Event) error {
		shown := showEvent(one)
		if synced = synced || one.Type == sandbox.EventSynced; synced {
			shown.Id = restconv.FromPosition(sandbox.StateVersion{ID: now.ID, Version: one.ResourceVersion})
		}
		return e.sendAs(shown.Id, string(shown.Type), shown)
	})
	if !began(w) {
		a.fail(w, r, err)
		return
	}
	problem := wireError(err)
	_ = e.sendAs("", string(rest.ObjectEventTypeError), rest.ObjectEvent{Type: rest.ObjectEventTypeError, Error: &problem}) // a client that is gone needs no event
}

// showEvent shows an event.
func showEvent(e sandbox.Event) rest.ObjectEvent {
	out := rest.ObjectEvent{Type: rest.ObjectEventType(e.Type)}
	switch {
	case e.Node != nil:
		out.Node = new(restconv.FromNode(*e.Node))
	case e.Template != nil:
		out.Template = new(restconv.FromTemplate(*e.Template, e.Builds))
	case e.Pool != nil:
		out.Pool = new(restconv.FromPool(*e.Pool, e.PoolStatus))
	case e.Sandbox != nil:
		out.Sandbox = new(restconv.FromSandbox(*e.Sandbox))
	}
	return out
}
