package client

import (
	"context"
	"net/http"

	"agentrun.dev/api/rest"
)

// Checkpoint writes a sandbox to disk. With a key the call can be repeated.
func (c *Client) Checkpoint(ctx context.Context, source string, spec rest.CheckpointCreate, key string) (rest.Checkpoint, error) {
	return get[rest.Checkpoint](ctx, c, call{method: http.MethodPost, path: c.object("sandboxes", source, "checkpoints"), body: spec, key: key})
}

// CheckpointOf returns a checkpoint.
func (c *Client) CheckpointOf(ctx context.Context, name string) (rest.Checkpoint, error) {
	return get[rest.Checkpoint](ctx, c, call{method: http.MethodGet, path: c.object("checkpoints", name)})
}

// Checkpoints lists all checkpoints.
func (c *Client) Checkpoints(ctx context.Context) ([]rest.Checkpoint, error) {
	return all(ctx, c, c.space+"/checkpoints", nil, func(l rest.CheckpointList) ([]rest.Checkpoint, string) { return l.Items, l.Next })
}

// DeleteCheckpoint deletes a checkpoint.
func (c *Client) DeleteCheckpoint(ctx context.Context, name string) error {
	return c.do(ctx, call{method: http.MethodDelete, path: c.object("checkpoints", name)})
}

// Restore makes a sandbox that continues from a checkpoint. With a key the call
// can be repeated.
func (c *Client) Restore(ctx context.Context, checkpoint string, spec rest.CheckpointRestore, key string) (rest.Sandbox, error) {
	return get[rest.Sandbox](ctx, c, call{method: http.MethodPost, path: c.object("checkpoints", checkpoint, "restore"), body: spec, key: key})
}

// Node returns the node's status.
func (c *Client) Node(ctx context.Context) (rest.Node, error) {
	return get[rest.Node](ctx, c, call{method: http.MethodGet, path: "/v1/node"})
}

// Stats returns the cost of all sandboxes. It does not wake hibernated ones.
func (c *Client) Stats(ctx context.Context) ([]rest.SandboxStats, error) {
	return all(ctx, c, c.space+"/stats", nil, func(l rest.SandboxStatsList) ([]rest.SandboxStats, string) { return l.Items, l.Next })
}

// StatsOf returns the cost of a sandbox.
func (c *Client) StatsOf(ctx context.Context, name string) (rest.SandboxStats, error) {
	return get[rest.SandboxStats](ctx, c, call{method: http.MethodGet, path: c.object("sandboxes", name, "stats")})
}
