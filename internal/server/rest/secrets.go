package rest

import (
	"context"
	"net/http"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// ListSecrets implements rest.ServerInterface.
func (a *api) ListSecrets(w http.ResponseWriter, r *http.Request, namespace string, q rest.ListSecretsParams) {
	listing(a, w, r, namespace, q.Limit, q.After, a.Service.Secrets,
		func(s sandbox.Secret) string { return string(s.Name) },
		server.Plain(restconv.FromSecret))
}

// GetSecret implements rest.ServerInterface.
func (a *api) GetSecret(w http.ResponseWriter, r *http.Request, namespace, name string) {
	object(a, w, r, namespace, name, shown(a.Service.Secret, restconv.FromSecret))
}

// PutSecret implements rest.ServerInterface.
func (a *api) PutSecret(w http.ResponseWriter, r *http.Request, namespace, name string) {
	a.writeSecret(w, r, namespace, name, a.Service.ApplySecret)
}

// PatchSecret implements rest.ServerInterface.
func (a *api) PatchSecret(w http.ResponseWriter, r *http.Request, namespace, name string) {
	a.writeSecret(w, r, namespace, name, a.Service.SetSecret)
}

// DeleteSecret implements rest.ServerInterface.
func (a *api) DeleteSecret(w http.ResponseWriter, r *http.Request, namespace, name string) {
	remove(a, w, r, namespace, name, func(ctx context.Context, k sandbox.Key, _ ...sandbox.Precondition) error {
		return a.Service.DeleteSecret(ctx, k) // its route has no precondition
	})
}

func (a *api) writeSecret(w http.ResponseWriter, r *http.Request, namespace, name string, write func(context.Context, sandbox.Key, sandbox.SecretData) (sandbox.Secret, error)) {
	object(a, w, r, namespace, name, func(ctx context.Context, k sandbox.Key) (rest.Secret, error) {
		var given rest.SecretValues
		if _, err := a.readJSON(w, r, 8*server.MaxBody, &given); err != nil {
			return rest.Secret{}, hideBody(err, `{"stringData": {"KEY": "text"}} or {"data": {"KEY": "base64"}}`)
		}
		data, err := restconv.ToSecretData(given)
		if err != nil {
			return rest.Secret{}, err
		}
		s, err := write(ctx, k, data)
		return restconv.FromSecret(s), err
	})
}

// hideBody removes from an error the reason why the text of a body is invalid:
// the reason may quote a part of a value.
func hideBody(err error, want string) error {
	if !sandbox.HasCode(err, sandbox.CodeInvalid) {
		return err
	}
	return sandbox.Errorf(sandbox.CodeInvalid, "the body is not what it should be").
		Because("what is wrong is not shown, as it may be a secret").
		Try("Send %s", want)
}
