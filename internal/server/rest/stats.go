package rest

import (
	"net/http"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// GetNode implements rest.ServerInterface.
func (a *api) GetNode(w http.ResponseWriter, r *http.Request, q rest.GetNodeParams) {
	switch {
	case q.Watch:
		a.watch(w, r, watching{kind: sandbox.KindNode, version: q.ResourceVersion, last: q.LastEventID})
		return
	case q.ResourceVersion != "":
		a.fail(w, r, errNoWatch())
		return
	}
	n, err := a.Service.Node(r.Context())
	a.answer(w, r, http.StatusOK, restconv.FromNode(n), err)
}

// CordonNode implements rest.ServerInterface.
func (a *api) CordonNode(w http.ResponseWriter, r *http.Request) {
	n, err := a.Service.Cordon(r.Context(), false)
	a.answer(w, r, http.StatusOK, restconv.FromNode(n), err)
}

// DrainNode implements rest.ServerInterface.
func (a *api) DrainNode(w http.ResponseWriter, r *http.Request) {
	n, err := a.Service.Cordon(r.Context(), true)
	a.answer(w, r, http.StatusOK, restconv.FromNode(n), err)
}

// UncordonNode implements rest.ServerInterface.
func (a *api) UncordonNode(w http.ResponseWriter, r *http.Request) {
	n, err := a.Service.Uncordon(r.Context())
	a.answer(w, r, http.StatusOK, restconv.FromNode(n), err)
}

// ListStats implements rest.ServerInterface.
func (a *api) ListStats(w http.ResponseWriter, r *http.Request, namespace string, q rest.ListStatsParams) {
	listing(a, w, r, namespace, q.Limit, q.After, a.Service.Costs,
		func(c sandbox.Cost) string { return c.Position() },
		server.Plain(restconv.FromCost))
}

// GetStats implements rest.ServerInterface.
func (a *api) GetStats(w http.ResponseWriter, r *http.Request, namespace, name string) {
	object(a, w, r, namespace, name, shown(a.Service.Cost, restconv.FromCost))
}
