package rest

import (
	"context"
	"net/http"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// GetCA implements rest.ServerInterface.
func (a *api) GetCA(w http.ResponseWriter, r *http.Request, namespace string) {
	a.ca(w, r, namespace, a.Service.NamespaceCA)
}

// PutCA implements rest.ServerInterface.
func (a *api) PutCA(w http.ResponseWriter, r *http.Request, namespace string) {
	a.ca(w, r, namespace, func(ctx context.Context, n sandbox.Namespace) (sandbox.NamespaceCA, error) {
		var given rest.CASpec
		if _, err := a.readJSON(w, r, server.MaxBody, &given); err != nil {
			return sandbox.NamespaceCA{}, hideBody(err, `{"names": ["api.example.org"]} or {"certificate": "PEM", "key": "PEM"}`)
		}
		return a.Service.SetNamespaceCA(ctx, n, restconv.ToCASpec(given))
	})
}

func (a *api) ca(w http.ResponseWriter, r *http.Request, namespace string, do func(context.Context, sandbox.Namespace) (sandbox.NamespaceCA, error)) {
	n, err := sandbox.ParseNamespace(namespace)
	var ca sandbox.NamespaceCA
	if err == nil {
		ca, err = do(r.Context(), n)
	}
	a.answer(w, r, http.StatusOK, restconv.FromNamespaceCA(ca), err)
}
