package node

import (
	"context"
	"errors"
	"sync"
	"time"

	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
)

// MaxConns is how many connections to ports of a sandbox may be open at once. An
// agent serves twice as many calls, so connections never keep other calls out.
const MaxConns = guestrpc.MaxStreams / 2

// connectTimeout bounds a connection to a program that listens but does not
// accept.
const connectTimeout = 10 * time.Second

// portConn is a connection to a program in a sandbox.
type portConn struct {
	*guestrpc.PortConn
	member *member
	once   sync.Once
}

// Close ends the connection.
func (c *portConn) Close() error {
	c.once.Do(func() {
		c.member.mu.Lock()
		defer c.member.mu.Unlock()
		c.member.conns--
	})
	return c.PortConn.Close()
}

// Connect implements sandbox.Session.
func (u *use) Connect(ctx context.Context, port uint16) (sandbox.Conn, error) {
	b, name := u.member, u.record.Name
	b.mu.Lock()
	full := b.conns >= MaxConns
	if !full {
		b.conns++
	}
	b.mu.Unlock()
	if full {
		return nil, sandbox.Errorf(sandbox.CodeCapacity, "sandbox %s has %d connections to its ports, and can have no more", name, MaxConns).
			Try("Close some, or try again")
	}
	c := &portConn{member: b}
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	var err error
	if c.PortConn, err = u.Agent().Connect(ctx, guestrpc.ConnectRequest{Port: port}); err == nil {
		return c, nil
	}
	b.mu.Lock()
	b.conns--
	b.mu.Unlock()
	var guest *guestrpc.Error
	switch {
	case errors.As(err, &guest) && guest.Code == guestrpc.CodeFailedPrecondition:
		return nil, sandbox.Errorf(sandbox.CodePortClosed, "nothing listens on port %d of sandbox %s", port, name).
			Try("Start a server in it that listens on 127.0.0.1:%d or on all addresses", port)
	case errors.Is(err, context.DeadlineExceeded):
		return nil, sandbox.Errorf(sandbox.CodePortClosed, "what listens on port %d of sandbox %s does not accept connections", port, name).
			Because("it did not within %v", connectTimeout).Try("See whether the server in it hangs")
	}
	return nil, err
}
