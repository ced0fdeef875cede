package client

import (
	"context"
	"net/http"
	"net/url"

	"agentrun.dev/api/rest"
)

// CreateKey makes an API key. Only this answer contains its text.
func (c *Client) CreateKey(ctx context.Context, spec rest.KeyCreate) (rest.KeyCreated, error) {
	return get[rest.KeyCreated](ctx, c, call{method: http.MethodPost, path: "/v1/keys", body: spec})
}

// Keys lists all API keys.
func (c *Client) Keys(ctx context.Context) ([]rest.Key, error) {
	l, err := get[rest.KeyList](ctx, c, call{method: http.MethodGet, path: "/v1/keys"})
	return l.Items, err
}

// RevokeKey revokes an API key.
func (c *Client) RevokeKey(ctx context.Context, id string) error {
	return c.do(ctx, call{method: http.MethodDelete, path: "/v1/keys/" + url.PathEscape(id)})
}
