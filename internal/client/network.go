package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"agentrun.dev/api/rest"
)

// SetNetworkPolicy replaces what a sandbox may connect to, within its bounds.
func (c *Client) SetNetworkPolicy(ctx context.Context, name string, p rest.NetworkPolicy) (rest.Sandbox, error) {
	return get[rest.Sandbox](ctx, c, call{method: http.MethodPut, path: c.object("sandboxes", name, "network", "policy"), body: p})
}

// DeleteNetworkPolicy removes a sandbox's own policy, so that its bounds alone hold.
func (c *Client) DeleteNetworkPolicy(ctx context.Context, name string) (rest.Sandbox, error) {
	return get[rest.Sandbox](ctx, c, call{method: http.MethodDelete, path: c.object("sandboxes", name, "network", "policy")})
}

// NetworkLogRequest says which part of a log is wanted.
type NetworkLogRequest struct {
	// From is the number of the first entry; 0 is 1.
	From int64
	// Limit is how many at most; 0 is the daemon's default.
	Limit int
	// Wait is how long to wait for an entry if there is none.
	Wait time.Duration
	// Open asks for the connections that are open, too.
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
