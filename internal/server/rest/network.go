package rest

import (
	"context"
	"net/http"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// PutNetworkPolicy implements rest.ServerInterface.
func (a *api) PutNetworkPolicy(w http.ResponseWriter, r *http.Request, namespace, name string, _ rest.PutNetworkPolicyParams) {
	a.sandboxVerb(w, r, namespace, name, func(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
		// A body that is null would be a policy that allows nothing, so it is
		// refused.
		var given *rest.NetworkPolicy
		if _, err := a.readJSON(w, r, server.MaxBody, &given); err != nil {
			return sandbox.Sandbox{}, err
		}
		if given == nil {
			return sandbox.Sandbox{}, sandbox.Errorf(sandbox.CodeInvalid, "the body is null").Try("Send a policy; DELETE removes the sandbox's own one")
		}
		own, err := restconv.ToNetworkPolicy(*given)
		if err != nil {
			return sandbox.Sandbox{}, err
		}
		return a.Service.SetNetworkPolicy(ctx, k, &own, when...)
	})
}

// DeleteNetworkPolicy implements rest.ServerInterface.
func (a *api) DeleteNetworkPolicy(w http.ResponseWriter, r *http.Request, namespace, name string, _ rest.DeleteNetworkPolicyParams) {
	a.sandboxVerb(w, r, namespace, name, func(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
		return a.Service.SetNetworkPolicy(ctx, k, nil, when...)
	})
}

// GetNetworkLog implements rest.ServerInterface.
func (a *api) GetNetworkLog(w http.ResponseWriter, r *http.Request, namespace, name string, q rest.GetNetworkLogParams) {
	object(a, w, r, namespace, name, func(ctx context.Context, k sandbox.Key) (rest.NetworkLog, error) {
		ask, err := trafficRequest(k, q)
		if err != nil {
			return rest.NetworkLog{}, err
		}
		page, err := a.Service.Traffic(ctx, ask)
		return restconv.FromTraffic(page), err
	})
}

func trafficRequest(k sandbox.Key, q rest.GetNetworkLogParams) (out sandbox.TrafficRequest, err error) {
	out = sandbox.TrafficRequest{Key: k, Open: q.Open}
	if q.From != nil {
		if *q.From < 1 {
			return out, sandbox.Invalid("from", "%d is not a number of an entry: the first one is 1", *q.From)
		}
		out.From = uint64(*q.From)
	}
	if q.Limit != nil {
		if out.Max = *q.Limit; out.Max < 1 {
			return out, sandbox.Invalid("limit", "%d is not between 1 and %d", out.Max, sandbox.MaxTraffic)
		}
	}
	out.Wait, err = restconv.ToDuration("wait", q.Wait)
	return out, err
}
