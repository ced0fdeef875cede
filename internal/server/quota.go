package server

import (
	"net/http"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/sandbox"
)

// GetQuota implements rest.ServerInterface.
func (a *api) GetQuota(w http.ResponseWriter, r *http.Request, namespace string) {
	a.quota(w, r, namespace, a.Service.QuotaOf)
}

// PutQuota implements rest.ServerInterface.
func (a *api) PutQuota(w http.ResponseWriter, r *http.Request, namespace string) {
	a.quota(w, r, namespace, func(n sandbox.Namespace) (q sandbox.QuotaUse, err error) {
		var given rest.QuotaSpec
		if _, err := a.readJSON(w, r, maxBody, &given); err != nil {
			return q, err
		}
		if given.Memory < 0 {
			return q, invalid("memory", "%d is negative", given.Memory)
		}
		if given.Storage < 0 {
			return q, invalid("storage", "%d is negative", given.Storage)
		}
		return a.Service.SetQuota(sandbox.Quota{Namespace: n, Memory: uint64(given.Memory), Sandboxes: given.Sandboxes, Storage: uint64(given.Storage)})
	})
}

// DeleteQuota implements rest.ServerInterface.
func (a *api) DeleteQuota(w http.ResponseWriter, r *http.Request, namespace string) {
	n, err := sandbox.ParseNamespace(namespace)
	if err == nil {
		_, err = a.Service.SetQuota(sandbox.Quota{Namespace: n})
	}
	a.done(w, r, err)
}

func (a *api) quota(w http.ResponseWriter, r *http.Request, namespace string, do func(sandbox.Namespace) (sandbox.QuotaUse, error)) {
	n, err := sandbox.ParseNamespace(namespace)
	var q sandbox.QuotaUse
	if err == nil {
		q, err = do(n)
	}
	a.answer(w, r, http.StatusOK, rest.Quota{
		Namespace: string(q.Namespace),
		Spec:      rest.QuotaSpec{Memory: int64(q.Memory), Sandboxes: q.Sandboxes, Storage: int64(q.Storage)},
		Used:      rest.QuotaUse{Memory: int64(q.UsedMemory), Sandboxes: q.UsedSandboxes, Storage: int64(q.UsedStorage)},
	}, err)
}
