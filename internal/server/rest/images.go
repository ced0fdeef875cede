package rest

import (
	"context"
	"net/http"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// ListImages implements rest.ServerInterface.
func (a *api) ListImages(w http.ResponseWriter, r *http.Request, namespace string, q rest.ListImagesParams) {
	listing(a, w, r, namespace, q.Limit, q.After, a.Service.Images,
		func(i sandbox.Image) string { return i.Digest }, server.Plain(restconv.FromImage))
}

// PublishImage implements rest.ServerInterface.
func (a *api) PublishImage(w http.ResponseWriter, r *http.Request) {
	var given rest.ImagePublish
	var img sandbox.Image
	_, err := a.readJSON(w, r, server.MaxBody, &given)
	var wanted sandbox.PublishRequest
	if err == nil {
		wanted, err = restconv.ToPublish(given)
	}
	if err == nil {
		err = server.MayPublish(r.Context())
	}
	if err == nil {
		img, err = a.Service.PublishImage(r.Context(), wanted)
	}
	a.answer(w, r, http.StatusOK, restconv.FromImage(img), err)
}

// UnpublishImage implements rest.ServerInterface.
func (a *api) UnpublishImage(w http.ResponseWriter, r *http.Request) {
	var given rest.ImageUnpublish
	_, err := a.readJSON(w, r, server.MaxBody, &given)
	if err == nil {
		err = server.MayPublish(r.Context())
	}
	if err == nil {
		err = a.Service.UnpublishImage(r.Context(), given.Image)
	}
	a.done(w, r, err)
}

// ListRegistryLogins implements rest.ServerInterface.
func (a *api) ListRegistryLogins(w http.ResponseWriter, r *http.Request, namespace string, q rest.ListRegistryLoginsParams) {
	listing(a, w, r, namespace, q.Limit, q.After, a.Service.RegistryLogins,
		func(l sandbox.RegistryLogin) string { return string(l.Registry) }, server.Plain(restconv.FromRegistryLogin))
}

// PutRegistryLogin implements rest.ServerInterface.
func (a *api) PutRegistryLogin(w http.ResponseWriter, r *http.Request, namespace string) {
	var login sandbox.RegistryLogin
	var given rest.RegistryCredentials
	_, err := a.readJSON(w, r, server.MaxBody, &given)
	if err != nil {
		err = hideBody(err, `{"registry": "HOST[:PORT]", "username": "NAME", "password": "PASSWORD"}`)
	}
	if err == nil {
		err = a.registry(r.Context(), namespace, given.Registry, func(ctx context.Context, n sandbox.Namespace, host sandbox.RegistryHost) (err error) {
			login, err = a.Service.SetRegistryLogin(ctx, n, host, restconv.ToRegistryCredentials(given))
			return err
		})
	}
	a.answer(w, r, http.StatusOK, restconv.FromRegistryLogin(login), err)
}

// DeleteRegistryLogin implements rest.ServerInterface.
func (a *api) DeleteRegistryLogin(w http.ResponseWriter, r *http.Request, namespace string, q rest.DeleteRegistryLoginParams) {
	a.done(w, r, a.registry(r.Context(), namespace, q.Registry, a.Service.DeleteRegistryLogin))
}

func (a *api) registry(ctx context.Context, namespace, registry string, do func(context.Context, sandbox.Namespace, sandbox.RegistryHost) error) error {
	n, err := sandbox.ParseNamespace(namespace)
	if err != nil {
		return err
	}
	host, err := sandbox.ParseRegistryHost(registry)
	if err != nil {
		return err
	}
	return do(ctx, n, host)
}
