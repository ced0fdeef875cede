package client

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/sandbox"
)

// A watch that was cut off waits for reconnect before it continues, and longer each
// time, up to reconnectSeldom. The daemon may be restarting.
const (
	reconnect       = 50 * time.Millisecond
	reconnectSeldom = 2 * time.Second
)

// WatchNode is WatchObjects for the node.
func (c *Client) WatchNode(ctx context.Context, each func(rest.ObjectEvent) (more bool, err error)) error {
	return c.watch(ctx, "/v1/node", each)
}

// WatchObjects calls each with the events of all objects of a kind (templates, pools or
// sandboxes) until each returns false. It starts with the existing objects. After an
// interruption it continues where it stopped. If the daemon no longer has the changes since
// then, the watch starts again: each gets the existing objects once more, and then an event
// of type synced.
func (c *Client) WatchObjects(ctx context.Context, kind string, each func(rest.ObjectEvent) (more bool, err error)) error {
	return c.watch(ctx, c.space+"/"+kind, each)
}

func (c *Client) watch(ctx context.Context, path string, each func(rest.ObjectEvent) (more bool, err error)) error {
	last, pause := "", reconnect
	for {
		query := url.Values{"watch": {"true"}}
		if last != "" {
			query.Set("resourceVersion", last)
		}
		var failed *Error
		var stop error // the error that each has returned
		err := events(ctx, c, call{method: http.MethodGet, path: path, query: query}, func(e rest.ObjectEvent) (bool, error) {
			pause = reconnect
			if e.Type == rest.ObjectEventTypeError {
				failed = &Error{}
				if e.Error != nil {
					failed.Details = *e.Error
				}
				return false, nil
			}
			if e.Id != "" {
				last = e.Id
			}
			var more bool
			more, stop = each(e)
			return more, stop
		})
		if failed == nil {
			errors.As(err, &failed)
		}
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case stop != nil:
			return stop
		case failed != nil:
			switch sandbox.Code(failed.Code) {
			case sandbox.CodeTooOld, sandbox.CodeOtherState:
				last = ""
			case sandbox.CodeClosing:
			default:
				return failed
			}
		case err == nil:
			return nil
		case !errors.Is(err, ErrCutOff) && last == "":
			return err // the daemon was never reached
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		pause = min(2*pause, reconnectSeldom)
	}
}

// Cordon makes the node refuse new sandboxes. Drain also hibernates the running ones, and
// Uncordon ends both.
func (c *Client) Cordon(ctx context.Context) (rest.Node, error) { return c.node(ctx, "cordon") }

// Drain cordons the node and hibernates its running sandboxes.
func (c *Client) Drain(ctx context.Context) (rest.Node, error) { return c.node(ctx, "drain") }

// Uncordon makes the node accept new sandboxes again.
func (c *Client) Uncordon(ctx context.Context) (rest.Node, error) { return c.node(ctx, "uncordon") }

func (c *Client) node(ctx context.Context, verb string) (rest.Node, error) {
	return get[rest.Node](ctx, c, call{method: http.MethodPost, path: "/v1/node/" + verb})
}
