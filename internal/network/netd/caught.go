package netd

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"runtime/debug"

	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/stack"
)

// caught is the Outside of a sandbox. A panic in it ends one connection, not the
// process.
type caught struct {
	outside stack.Outside
	wire    netctl.ID
	log     *slog.Logger
}

// recovered is deferred. It turns a panic into an error, unless err is nil, and then
// calls end, which ends the call that has panicked.
func (c *caught) recovered(what string, err *error, end func()) {
	v := recover()
	if v == nil {
		return
	}
	c.log.Error("a connection has panicked", "wire", c.wire, "in", what, "panic", v, "stack", string(debug.Stack()))
	if err != nil {
		*err = fmt.Errorf("%w: netd has panicked", stack.ErrRefused)
	}
	if end != nil {
		end()
	}
}

// DialTCP implements stack.Outside.
func (c *caught) DialTCP(ctx context.Context, from, to netip.AddrPort) (r stack.Remote, err error) {
	defer c.recovered("DialTCP", &err, nil)
	if r, err = c.outside.DialTCP(ctx, from, to); err != nil {
		return nil, err
	}
	return &caughtRemote{r, c}, nil
}

// DialUDP implements stack.Outside.
func (c *caught) DialUDP(ctx context.Context, from, to netip.AddrPort) (conn net.Conn, err error) {
	defer c.recovered("DialUDP", &err, nil)
	return c.outside.DialUDP(ctx, from, to)
}

// ServeDNS implements stack.Outside.
func (c *caught) ServeDNS(ctx context.Context, query []byte, tcp bool) []byte {
	defer c.recovered("ServeDNS", nil, nil)
	return c.outside.ServeDNS(ctx, query, tcp)
}

// caughtRemote is an open connection of such an Outside.
type caughtRemote struct {
	stack.Remote
	caught *caught
}

// Splice implements stack.Remote.
func (r *caughtRemote) Splice(inside stack.Conn) {
	defer r.caught.recovered("Splice", nil, func() {
		defer r.caught.recovered("Close", nil, nil)
		_, _ = inside.Reset(), r.Remote.Close() // the connection is lost anyway
	})
	r.Remote.Splice(inside)
}
