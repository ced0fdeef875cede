package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"agentrun.dev/api/rest"
)

// SetNetworkPolicy replaces a sandbox's own network policy, within its bounds.
func (c *Client) SetNetworkPolicy(ctx context.Context, name string, p rest.NetworkPolicy) (rest.Sandbox, error) {
	return get[rest.Sandbox](ctx, c, call{method: http.MethodPut, path: c.object("sandboxes", name, "network", "policy"), body: p})
}

// DeleteNetworkPolicy removes a sandbox's own policy, so that only its bounds apply.
func (c *Client) DeleteNetworkPolicy(ctx context.Context, name string) (rest.Sandbox, error) {
	return get[rest.Sandbox](ctx, c, call{method: http.MethodDelete, path: c.object("sandboxes", name, "network", "policy")})
}

// NetworkLogRequest selects a part of a log.
type NetworkLogRequest struct {
	// From is the number of the first entry; 0 means 1.
	From int64
	// Limit is the greatest number of entries; 0 means the daemon's default.
	Limit int
	// Wait is how long the daemon waits for an entry if there is none yet.
	Wait time.Duration
	// Open requests the open connections as well.
	Open bool
}

// NetworkLog reads a part of the log of a sandbox's network.
func (c *Client) NetworkLog(ctx context.Context, name string, r NetworkLogRequest) (rest.NetworkLog, error) {
	query := url.Values{"open": {strconv.FormatBool(r.Open)}}
	if r.From > 0 {
		query.Set("from", strconv.FormatInt(r.From, 10))
	}
	if r.Limit > 0 {
		query.Set("limit", strconv.Itoa(r.Limit))
	}
	if r.Wait > 0 {
		query.Set("wait", r.Wait.String())
	}
	return get[rest.NetworkLog](ctx, c, call{method: http.MethodGet, path: c.object("sandboxes", name, "network", "log"), query: query})
}
