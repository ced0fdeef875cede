package rest

import (
	"net/http"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// GetNode implements rest.ServerInterface.
func (a *api) GetNode(w http.ResponseWriter, r *http.Request) {
	n, err := a.Service.Node(r.Context())
	a.answer(w, r, http.StatusOK, restconv.FromNode(n), err)
}

// ListStats implements rest.ServerInterface.
func (a *api) ListStats(w http.ResponseWriter, r *http.Request, namespace string, q rest.ListStatsParams) {
	listing(a, w, r, namespace, q.Limit, q.After, a.Service.Costs,
		func(c sandbox.Cost) string { return c.Position() },
		server.Plain(restconv.FromCost),
		func(items []rest.SandboxStats, next string) any {
			return rest.SandboxStatsList{Items: items, Next: next}
		})
}

// GetStats implements rest.ServerInterface.
func (a *api) GetStats(w http.ResponseWriter, r *http.Request, namespace, name string) {
	object(a, w, r, namespace, name, shown(a.Service.Cost, restconv.FromCost))
}
