package remote

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/server"
)

// Target says how to reach a node over TCP.
type Target struct {
	// Address is HOST:PORT.
	Address string
	// Node is the name that the node's certificate must have; the address is then only
	// the way to the node. If Node is empty, any certificate for the host is accepted.
	Node string
	// Files are the caller's files: its certificate and key, and the CAs of nodes.
	Files access.MutualFiles
	// Failed is called when the files cannot be used; the previous ones stay in
	// use.
	Failed func(error)
	// Window is how many bytes of answers a node may send ahead, on one call and on all; 0 leaves
	// that to gRPC, which begins with 64 KiB.
	Window int32
	// Look is how often to look at the files; 0 means access.LookEvery.
	Look time.Duration
}

// Conn is a connection with a node over mutual TLS. When its files change, new calls go
// over a new connection, and the one before ends with the last call on it. So a caller that
// renews its certificate in time loses no call.
type Conn struct {
	target Target
	end    *access.Mutual
	stop   context.CancelFunc

	mu     sync.Mutex // protects all following fields
	now    *link
	before map[*link]bool // connections that were replaced and still have calls
	closed bool
}

// link is one connection.
type link struct {
	*grpc.ClientConn
	calls int
}

var _ grpc.ClientConnInterface = (*Conn)(nil)

// Bounds of a client. Pings are not sent more often than a node takes them.
const (
	pingTime    = 30 * time.Second
	pingTimeout = 20 * time.Second
	maxAnswer   = 64 << 20 // a page of large objects
	maxConnect  = 5 * time.Second
)

// retries is how often a node that does not answer is tried: a daemon that was
// restarted is back within seconds.
var retries = backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: maxConnect}

// Dial makes a connection; the first call opens it.
func Dial(t Target) (*Conn, error) {
	if _, _, err := net.SplitHostPort(t.Address); err != nil {
		return nil, fmt.Errorf("reach a node: %w", err)
	}
	end, err := access.OpenMutual(t.Files)
	if err != nil {
		return nil, fmt.Errorf("reach the node at %s: %w", t.Address, err)
	}
	if t.Look == 0 {
		t.Look = access.LookEvery
	}
	c := &Conn{target: t, end: end, before: map[*link]bool{}}
	if c.now, err = c.open(); err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	c.stop = stop
	go c.follow(ctx)
	return c, nil
}

func (c *Conn) open() (*link, error) {
	var more []grpc.DialOption
	if w := c.target.Window; w > 0 {
		more = append(more, grpc.WithInitialWindowSize(w), grpc.WithInitialConnWindowSize(w))
	}
	conn, err := grpc.NewClient("passthrough:///"+c.target.Address, append(more,
		grpc.WithTransportCredentials(credentials.NewTLS(c.end.Now().Client(c.target.Node))),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingTime, Timeout: pingTimeout}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)),
		grpc.WithMaxHeaderListSize(server.MaxHeader),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: retries, MinConnectTimeout: maxConnect}),
	)...)
	if err != nil {
		return nil, fmt.Errorf("reach the node at %s: %w", c.target.Address, err)
	}
	return &link{ClientConn: conn}, nil
}

// follow looks at the files until ctx ends.
func (c *Conn) follow(ctx context.Context) {
	tick := time.NewTicker(c.target.Look)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		changed, err := c.end.Look()
		if changed {
			err = c.replace()
		}
		if err != nil && c.target.Failed != nil {
			c.target.Failed(err)
		}
	}
}

// replace makes calls that begin from now on go over a new connection.
func (c *Conn) replace() error {
	fresh, err := c.open()
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fresh.Close()
	}
	old := c.now
	c.now = fresh
	if old.calls == 0 {
		return old.Close()
	}
	c.before[old] = true
	return nil
}

// take returns the connection for a call; the caller calls done at the end of
// the call.
func (c *Conn) take() (l *link, done func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l = c.now
	l.calls++
	return l, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if l.calls--; l.calls == 0 && c.before[l] {
			delete(c.before, l)
			_ = l.Close() // it has no calls
		}
	}
}

// Invoke implements grpc.ClientConnInterface.
func (c *Conn) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	l, done := c.take()
	err := l.Invoke(ctx, method, args, reply, opts...)
	done()
	return err
}

// NewStream implements grpc.ClientConnInterface.
func (c *Conn) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	l, done := c.take()
	done = sync.OnceFunc(done)
	s, err := l.NewStream(ctx, desc, method, append(slices.Clip(opts), grpc.OnFinish(func(error) { done() }))...)
	if err != nil { // gRPC may have called OnFinish or not
		done()
	}
	return s, err
}

// Close ends the connection and all calls.
func (c *Conn) Close() error {
	c.stop()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	err := c.now.Close()
	for l := range c.before {
		err = errors.Join(err, l.Close())
	}
	clear(c.before)
	return err
}

// As makes calls over a connection for a principal, as a controller or a gateway.
func As(conn grpc.ClientConnInterface, a access.Acting) grpc.ClientConnInterface {
	var pairs []string
	for key, value := range server.ActingMetadata(a) {
		pairs = append(pairs, key, value)
	}
	return &acting{conn, pairs}
}

// acting names a principal in each call.
type acting struct {
	grpc.ClientConnInterface
	pairs []string
}

func (a *acting) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	return a.ClientConnInterface.Invoke(metadata.AppendToOutgoingContext(ctx, a.pairs...), method, args, reply, opts...)
}

func (a *acting) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	return a.ClientConnInterface.NewStream(metadata.AppendToOutgoingContext(ctx, a.pairs...), desc, method, opts...)
}
