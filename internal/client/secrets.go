package client

import (
	"context"
	"net/http"

	"agentrun.dev/api/rest"
)

// PutSecret makes a secret or replaces all its values.
func (c *Client) PutSecret(ctx context.Context, name string, values rest.SecretValues) (rest.Secret, error) {
	return get[rest.Secret](ctx, c, call{method: http.MethodPut, path: c.object("secrets", name), body: values})
}

// SetSecret sets some values of a secret, and makes the secret if it is
// missing.
func (c *Client) SetSecret(ctx context.Context, name string, values rest.SecretValues) (rest.Secret, error) {
	return get[rest.Secret](ctx, c, call{method: http.MethodPatch, path: c.object("secrets", name), body: values})
}

// Secrets lists all secrets and their keys.
func (c *Client) Secrets(ctx context.Context) ([]rest.Secret, error) {
	return all(ctx, c, c.space+"/secrets", nil, func(l rest.SecretList) ([]rest.Secret, string) { return l.Items, l.Next })
}

// DeleteSecret deletes a secret.
func (c *Client) DeleteSecret(ctx context.Context, name string) error {
	return c.do(ctx, call{method: http.MethodDelete, path: c.object("secrets", name)})
}
