package client

import (
	"context"
	"net/http"

	"agentrun.dev/api/rest"
)

// Quota returns the namespace's quota and its use.
func (c *Client) Quota(ctx context.Context) (rest.Quota, error) {
	return get[rest.Quota](ctx, c, call{method: http.MethodGet, path: c.space + "/quota"})
}

// PutQuota sets the namespace's quota.
func (c *Client) PutQuota(ctx context.Context, q rest.QuotaSpec) (rest.Quota, error) {
	return get[rest.Quota](ctx, c, call{method: http.MethodPut, path: c.space + "/quota", body: q})
}

// DeleteQuota removes the namespace's quota.
func (c *Client) DeleteQuota(ctx context.Context) error {
	return c.do(ctx, call{method: http.MethodDelete, path: c.space + "/quota"})
}
