package client

import (
	"context"
	"net/http"

	"agentrun.dev/api/rest"
)

// CA returns the CA that the namespace's sandboxes can trust.
func (c *Client) CA(ctx context.Context) (rest.NamespaceCA, error) {
	return get[rest.NamespaceCA](ctx, c, call{method: http.MethodGet, path: c.space + "/ca"})
}

// PutCA replaces the namespace's CA.
func (c *Client) PutCA(ctx context.Context, spec rest.CASpec) (rest.NamespaceCA, error) {
	return get[rest.NamespaceCA](ctx, c, call{method: http.MethodPut, path: c.space + "/ca", body: spec})
}
