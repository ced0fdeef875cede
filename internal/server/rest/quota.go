package rest

import (
	"context"
	"net/http"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// GetQuota implements rest.ServerInterface.
func (a *api) GetQuota(w http.ResponseWriter, r *http.Request, namespace string) {
	a.quota(w, r, namespace, a.Service.QuotaOf)
}

// PutQuota implements rest.ServerInterface.
func (a *api) PutQuota(w http.ResponseWriter, r *http.Request, namespace string) {
	a.quota(w, r, namespace, func(ctx context.Context, n sandbox.Namespace) (q sandbox.QuotaUse, err error) {
		var given rest.QuotaSpec
		if _, err := a.readJSON(w, r, server.MaxBody, &given); err != nil {
			return q, err
		}
		wanted, err := restconv.ToQuota(n, given)
		if err != nil {
			return q, err
		}
		return a.Service.SetQuota(ctx, wanted)
	})
}

// DeleteQuota implements rest.ServerInterface.
func (a *api) DeleteQuota(w http.ResponseWriter, r *http.Request, namespace string) {
	n, err := sandbox.ParseNamespace(namespace)
	if err == nil {
		_, err = a.Service.SetQuota(r.Context(), sandbox.Quota{Namespace: n})
	}
	a.done(w, r, err)
}

func (a *api) quota(w http.ResponseWriter, r *http.Request, namespace string, do func(context.Context, sandbox.Namespace) (sandbox.QuotaUse, error)) {
	n, err := sandbox.ParseNamespace(namespace)
	var q sandbox.QuotaUse
	if err == nil {
		q, err = do(r.Context(), n)
	}
	a.answer(w, r, http.StatusOK, restconv.FromQuotaUse(q), err)
}
