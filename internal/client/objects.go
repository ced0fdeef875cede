package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"agentrun.dev/api/rest"
)

// Version returns the daemon's version.
func (c *Client) Version(ctx context.Context) (rest.Version, error) {
	return get[rest.Version](ctx, c, call{method: http.MethodGet, path: "/v1/version"})
}

// object returns the path of an object.
func (c *Client) object(kind, name string, rest ...string) string {
	path := c.space + "/" + kind + "/" + url.PathEscape(name)
	for _, part := range rest {
		path += "/" + url.PathEscape(part)
	}
	return path
}

// all reads all pages of a list.
func all[L, T any](ctx context.Context, c *Client, path string, query url.Values, page func(L) ([]T, string)) (out []T, err error) {
	if query == nil {
		query = url.Values{}
	}
	for {
		l, err := get[L](ctx, c, call{method: http.MethodGet, path: path, query: query})
		if err != nil {
			return nil, err
		}
		items, next := page(l)
		out = append(out, items...)
		if next == "" {
			return out, nil
		}
		query.Set("after", next)
	}
}

// PutTemplate makes a template or changes it.
func (c *Client) PutTemplate(ctx context.Context, name string, spec rest.TemplateSpec) (rest.Template, error) {
	return get[rest.Template](ctx, c, call{method: http.MethodPut, path: c.object("templates", name), body: spec})
}

// Template returns a template.
func (c *Client) Template(ctx context.Context, name string) (rest.Template, error) {
	return get[rest.Template](ctx, c, call{method: http.MethodGet, path: c.object("templates", name)})
}

// Templates lists all templates.
func (c *Client) Templates(ctx context.Context) ([]rest.Template, error) {
	return all(ctx, c, c.space+"/templates", nil, func(l rest.TemplateList) ([]rest.Template, string) { return l.Items, l.Next })
}

// DeleteTemplate deletes a template.
func (c *Client) DeleteTemplate(ctx context.Context, name string) error {
	return c.do(ctx, call{method: http.MethodDelete, path: c.object("templates", name)})
}

// TemplateLog writes the log of a template's build to w: the part that q selects. It
// waits for the end of the build only if q.Follow is set.
func (c *Client) TemplateLog(ctx context.Context, name string, q rest.GetTemplateLogParams, w io.Writer) error {
	query := url.Values{"follow": {strconv.FormatBool(q.Follow != nil && *q.Follow)}}
	if q.Stage != "" {
		query.Set("stage", string(q.Stage))
	}
	if q.Offset != nil {
		query.Set("offset", strconv.FormatInt(*q.Offset, 10))
	}
	if q.Tail != nil {
		query.Set("tail", strconv.Itoa(*q.Tail))
	}
	res, err := c.send(ctx, call{method: http.MethodGet, path: c.object("templates", name, "log"), query: query})
	if err != nil {
		return err
	}
	defer res.Body.Close()
	_, err = io.Copy(w, res.Body)
	return err
}

// PutPool makes a pool or changes it.
func (c *Client) PutPool(ctx context.Context, name string, spec rest.PoolSpec) (rest.Pool, error) {
	return get[rest.Pool](ctx, c, call{method: http.MethodPut, path: c.object("pools", name), body: spec})
}

// Pool returns a pool.
func (c *Client) Pool(ctx context.Context, name string) (rest.Pool, error) {
	return get[rest.Pool](ctx, c, call{method: http.MethodGet, path: c.object("pools", name)})
}

// Pools lists all pools.
func (c *Client) Pools(ctx context.Context) ([]rest.Pool, error) {
	return all(ctx, c, c.space+"/pools", nil, func(l rest.PoolList) ([]rest.Pool, string) { return l.Items, l.Next })
}

// DeletePool deletes a pool.
func (c *Client) DeletePool(ctx context.Context, name string) error {
	return c.do(ctx, call{method: http.MethodDelete, path: c.object("pools", name)})
}

// CreateSandbox claims a sandbox. With a key the call can be repeated.
func (c *Client) CreateSandbox(ctx context.Context, spec rest.SandboxCreate, key string) (rest.Sandbox, error) {
	return get[rest.Sandbox](ctx, c, call{method: http.MethodPost, path: c.space + "/sandboxes", body: spec, key: key})
}

// Sandbox returns a sandbox.
func (c *Client) Sandbox(ctx context.Context, name string) (rest.Sandbox, error) {
	return get[rest.Sandbox](ctx, c, call{method: http.MethodGet, path: c.object("sandboxes", name)})
}

// Sandboxes lists all sandboxes; with ended, also those that have ended.
func (c *Client) Sandboxes(ctx context.Context, ended bool) ([]rest.Sandbox, error) {
	query := url.Values{"ended": {strconv.FormatBool(ended)}}
	return all(ctx, c, c.space+"/sandboxes", query, func(l rest.SandboxList) ([]rest.Sandbox, string) { return l.Items, l.Next })
}

// Verb is an operation on a sandbox.
type Verb string

// The verbs.
const (
	Pause     Verb = "pause"
	Resume    Verb = "resume"
	Hibernate Verb = "hibernate"
)

// Do applies a verb to a sandbox.
func (c *Client) Do(ctx context.Context, name string, verb Verb) (rest.Sandbox, error) {
	return get[rest.Sandbox](ctx, c, call{method: http.MethodPost, path: c.object("sandboxes", name, string(verb))})
}

// Extend gives a sandbox a timeout that starts now; 0s means no timeout.
func (c *Client) Extend(ctx context.Context, name, timeout string) (rest.Sandbox, error) {
	return get[rest.Sandbox](ctx, c, call{method: http.MethodPost, path: c.object("sandboxes", name, "extend"), body: rest.Extend{Timeout: timeout}})
}

// Kill ends a sandbox.
func (c *Client) Kill(ctx context.Context, name string) (rest.Sandbox, error) {
	return get[rest.Sandbox](ctx, c, call{method: http.MethodDelete, path: c.object("sandboxes", name)})
}

// Fork forks a sandbox. With a key the call can be repeated.
func (c *Client) Fork(ctx context.Context, source string, spec rest.ForkCreate, key string) (rest.Fork, error) {
	return get[rest.Fork](ctx, c, call{method: http.MethodPost, path: c.object("sandboxes", source, "forks"), body: spec, key: key})
}

// ForkOf returns a fork.
func (c *Client) ForkOf(ctx context.Context, name string) (rest.Fork, error) {
	return get[rest.Fork](ctx, c, call{method: http.MethodGet, path: c.object("forks", name)})
}

// Forks lists all forks.
func (c *Client) Forks(ctx context.Context) ([]rest.Fork, error) {
	return all(ctx, c, c.space+"/forks", nil, func(l rest.ForkList) ([]rest.Fork, string) { return l.Items, l.Next })
}

// DeleteFork ends the children of a fork and deletes the fork.
func (c *Client) DeleteFork(ctx context.Context, name string) error {
	return c.do(ctx, call{method: http.MethodDelete, path: c.object("forks", name)})
}
