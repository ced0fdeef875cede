package server

import (
	"net/http"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/sandbox"
)

// GetNode implements rest.ServerInterface.
func (a *api) GetNode(w http.ResponseWriter, r *http.Request) {
	n, err := a.Service.Node()
	a.answer(w, r, http.StatusOK, rest.Node{
		Engine: n.Engine, Capacity: int64(n.Capacity), Reserved: int64(n.Reserved),
		Sandboxes: n.Sandboxes, Hibernated: n.Hibernated,
		Checkpoints: n.Checkpoints, CheckpointBytes: int64(n.CheckpointBytes),
	}, err)
}

// ListStats implements rest.ServerInterface.
func (a *api) ListStats(w http.ResponseWriter, r *http.Request, namespace string, q rest.ListStatsParams) {
	p, err := page(q.Limit, q.After)
	listing(a, w, r, namespace, p, err,
		func(n sandbox.Namespace, p sandbox.Page) ([]sandbox.Cost, error) {
			return a.Service.Costs(r.Context(), n, p)
		},
		func(c sandbox.Cost) string { return c.Position() },
		func(c sandbox.Cost) (rest.SandboxStats, error) { return showCost(c), nil },
		func(items []rest.SandboxStats, next string) any {
			return rest.SandboxStatsList{Items: items, Next: next}
		})
}

// GetStats implements rest.ServerInterface.
func (a *api) GetStats(w http.ResponseWriter, r *http.Request, namespace, name string) {
	object(a, w, r, namespace, name, func(k sandbox.Key) (rest.SandboxStats, error) {
		c, err := a.Service.Cost(r.Context(), k)
		return showCost(c), err
	})
}

func showCost(c sandbox.Cost) rest.SandboxStats {
	return rest.SandboxStats{
		Namespace: string(c.Namespace), Name: string(c.Name), Id: string(c.ID), State: rest.SandboxState(c.State), Time: c.At,
		Reserved: int64(c.Reserved), Own: int64(c.Own), Shared: int64(c.Proportional - min(c.Own, c.Proportional)),
		Cpu: c.CPU.Nanoseconds(), Generation: int64(c.Generation), Disk: int64(c.Stats.Disk),
	}
}
