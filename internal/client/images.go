package client

import (
	"context"
	"net/http"
	"net/url"

	"agentrun.dev/api/rest"
)

// Images lists the images that the namespace may use.
func (c *Client) Images(ctx context.Context) ([]rest.Image, error) {
	return all(ctx, c, c.space+"/images", nil, func(l rest.ImageList) ([]rest.Image, string) { return l.Items, l.Next })
}

// PublishImage lets all namespaces use an image.
func (c *Client) PublishImage(ctx context.Context, p rest.ImagePublish) (rest.Image, error) {
	return get[rest.Image](ctx, c, call{method: http.MethodPost, path: "/v1/images/publish", body: p})
}

// UnpublishImage ends that.
func (c *Client) UnpublishImage(ctx context.Context, image string) error {
	return c.do(ctx, call{method: http.MethodPost, path: "/v1/images/unpublish", body: rest.ImageUnpublish{Image: image}})
}

// RegistryLogins lists the registries that the namespace has credentials for.
func (c *Client) RegistryLogins(ctx context.Context) ([]rest.RegistryLogin, error) {
	return all(ctx, c, c.space+"/registries", nil, func(l rest.RegistryLoginList) ([]rest.RegistryLogin, string) { return l.Items, l.Next })
}

// PutRegistryLogin gives the namespace credentials for a registry.
func (c *Client) PutRegistryLogin(ctx context.Context, login rest.RegistryCredentials) (rest.RegistryLogin, error) {
	return get[rest.RegistryLogin](ctx, c, call{method: http.MethodPut, path: c.space + "/registries", body: login})
}

// DeleteRegistryLogin deletes them.
func (c *Client) DeleteRegistryLogin(ctx context.Context, registry string) error {
	return c.do(ctx, call{method: http.MethodDelete, path: c.space + "/registries", query: url.Values{"registry": {registry}}})
}
