package netctl

import (
	"context"
	"fmt"
	"os"
)

// Configure replaces the settings that all wires share.
func (c *Client) Configure(ctx context.Context, s Settings) error {
	return c.call(ctx, "configure netd", func(id uint64) Request { return &Configure{id, s} }, nil, nil)
}

// Attach lets the netd serve a wire. end is the host's end, which the caller keeps
// and closes.
func (c *Client) Attach(ctx context.Context, w Wire, end *os.File) error {
	return c.call(ctx, fmt.Sprintf("attach wire %s", w.ID), func(id uint64) Request { return &Attach{id, w} }, end, nil)
}

// SetPolicy replaces the rules of a wire. When it returns, the connections that the
// rules do not allow have been cut.
func (c *Client) SetPolicy(ctx context.Context, wire ID, rules Rules) error {
	return c.call(ctx, fmt.Sprintf("set the policy of wire %s", wire), func(id uint64) Request { return &SetPolicy{id, wire, rules} }, nil, nil)
}

// Detach ends a wire's connections, and drops the wire.
func (c *Client) Detach(ctx context.Context, wire ID) error {
	return c.ofWire(ctx, "detach", KindDetach, wire, nil)
}

// Pause stops the clocks of a wire's connections.
func (c *Client) Pause(ctx context.Context, wire ID) error {
	return c.ofWire(ctx, "pause", KindPause, wire, nil)
}

// Resume starts them again.
func (c *Client) Resume(ctx context.Context, wire ID) error {
	return c.ofWire(ctx, "resume", KindResume, wire, nil)
}

// Mark is called before a sandbox is captured. Collect is called after it, with the
// mark.
func (c *Client) Mark(ctx context.Context, wire ID) (mark uint64, err error) {
	var r Marked
	err = c.ofWire(ctx, "mark", KindMark, wire, &r)
	return r.Mark, err
}

// Collect returns the pins, and all connections that were open at any time since
// Mark. It ends the mark.
func (c *Client) Collect(ctx context.Context, wire ID, mark uint64) (l Lineage, err error) {
	err = c.call(ctx, fmt.Sprintf("collect the lineage of wire %s", wire), func(id uint64) Request { return &Collect{id, wire, mark} }, nil, &l)
	return l, err
}

func (c *Client) ofWire(ctx context.Context, verb string, kind Kind, wire ID, result Result) error {
	return c.call(ctx, fmt.Sprintf("%s wire %s", verb, wire), func(id uint64) Request { return &OfWire{kind, id, wire} }, nil, result)
}

// List describes all wires that the netd serves.
func (c *Client) List(ctx context.Context) ([]WireInfo, error) {
	var r Wires
	err := c.call(ctx, "list wires", func(id uint64) Request { return &Simple{KindList, id} }, nil, &r)
	return r.All, err
}

// Log reads entries of a wire's log. If the log has no entry from request.From on, it
// waits for one for up to request.Wait, and then returns a page without entries.
func (c *Client) Log(ctx context.Context, request Log) (page LogPage, err error) {
	request.Wait = min(max(request.Wait, 0), MaxWait)
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, request.Wait+usualPatience)
		defer cancel()
	}
	err = c.call(ctx, fmt.Sprintf("read the log of wire %s", request.Wire), func(id uint64) Request {
		r := request
		r.ID = id
		return &r
	}, nil, &page)
	return page, err
}

// Stats returns the sums over all wires.
func (c *Client) Stats(ctx context.Context) (s Stats, err error) {
	err = c.call(ctx, "read the statistics of netd", func(id uint64) Request { return &Simple{KindStats, id} }, nil, &s)
	return s, err
}

// Shutdown ends the netd, and returns when the netd has closed the connection.
func (c *Client) Shutdown(ctx context.Context) error {
	ctx, cancel := withDeadline(ctx)
	defer cancel()
	if err := c.call(ctx, "shut netd down", func(id uint64) Request { return &Simple{KindShutdown, id} }, nil, nil); err != nil {
		return err
	}
	select {
	case <-c.ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("shut netd down: it has not hung up: %w", ctx.Err())
	}
}
