package server

import (
	"net/http"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/sandbox"
)

// GetNode implements rest.ServerInterface.
func (a *api) GetNode(w http.ResponseWriter, r *http.Request) {
	n, err := a.Service.Node()
	a.answer(w, r, http.StatusOK, restconv.FromNode(n), err)
}

// ListStats implements rest.ServerInterface.
func (a *api) ListStats(w http.ResponseWriter, r *http.Request, namespace string, q rest.ListStatsParams) {
	p, err := page(q.Limit, q.After)
	listing(a, w, r, namespace, p, err,
		func(n sandbox.Namespace, p sandbox.Page) ([]sandbox.Cost, error) {
			return a.Service.Costs(r.Context(), n, p)
		},
		func(c sandbox.Cost) string { return c.Position() },
		func(c sandbox.Cost) (rest.SandboxStats, error) { return restconv.FromCost(c), nil },
		func(items []rest.SandboxStats, next string) any {
			return rest.SandboxStatsList{Items: items, Next: next}
		})
}

// GetStats implements rest.ServerInterface.
func (a *api) GetStats(w http.ResponseWriter, r *http.Request, namespace, name string) {
	object(a, w, r, namespace, name, func(k sandbox.Key) (rest.SandboxStats, error) {
		c, err := a.Service.Cost(r.Context(), k)
		return restconv.FromCost(c), err
	})
}
