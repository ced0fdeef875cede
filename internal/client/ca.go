package client

import (
	"context"
	"net/http"

	"agentrun.dev/api/rest"
)

// CA is the one that sandboxes of the namespace can trust.
func (c *Client) CA(ctx context.Context) (rest.NamespaceCA, error) {
	return get[rest.NamespaceCA](ctx, c, call{method: http.MethodGet, path: c.space + "/ca"})
}

// PutCA gives the namespace another one.
func (c *Client) PutCA(ctx context.Context, spec rest.CASpec) (rest.NamespaceCA, error) {
	return get[rest.NamespaceCA](ctx, c, call{method: http.MethodPut, path: c.space + "/ca", body: spec})
}
