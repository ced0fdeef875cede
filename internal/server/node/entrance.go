package node

import (
	"container/list"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/access/audit"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// bounds are the bounds of connections over TCP.
type bounds struct {
	// handshake is how long TLS and the first bytes of HTTP/2 may take together.
	handshake time.Duration
	// shaking is how many connections may be in TLS's handshake at once. One more ends
	// the oldest. An honest peer needs milliseconds, so a peer that leaves handshakes
	// open ends only its own.
	shaking int
	// connections is how many connections a component may have.
	connections int
	// look is how often to look at the files, and at the expiry of certificates.
	look time.Duration
}

var defaultBounds = bounds{handshake: server.ReadHeaderTimeout, shaking: 256, connections: 128, look: access.LookEvery}

// peerComponent is the component at the other end of a connection over TCP.
type peerComponent struct {
	credentials.CommonAuthInfo
	access.Component
}

func (peerComponent) AuthType() string { return "tls" }

// entrance makes and holds the connections of a server over TCP.
type entrance struct {
	end *access.Mutual
	bounds
	api *nodeAPI

	mu      sync.Mutex // protects all following fields
	closed  bool
	shaking *list.List // of *tcpConn, the oldest first
	open    map[access.Component]map[*tcpConn]bool
}

var _ credentials.TransportCredentials = (*entrance)(nil)

func newEntrance(end *access.Mutual, b bounds, api *nodeAPI) *entrance {
	return &entrance{end: end, bounds: b, api: api, shaking: list.New(), open: map[access.Component]map[*tcpConn]bool{}}
}

// tcpConn is a connection as it was accepted. Closing it, or a layer above it, takes
// it out of the entrance.
type tcpConn struct {
	*net.TCPConn
	entrance *entrance
	place    *list.Element // among those that are shaking hands; nil if it is not there

	// The following are set once, when the handshake has ended. After that, only
	// sweep changes the last two.
	who      access.Component
	certs    []*x509.Certificate
	material *access.Material
	until    time.Time
}

// Close implements net.Conn.
func (c *tcpConn) Close() error {
	e := c.entrance
	e.mu.Lock()
	e.leave(c)
	e.mu.Unlock()
	return c.TCPConn.Close()
}

// leave forgets a connection. The caller holds e.mu.
func (e *entrance) leave(c *tcpConn) {
	if c.place != nil {
		e.shaking.Remove(c.place)
		c.place = nil
	}
	if all := e.open[c.who]; all[c] {
		if delete(all, c); len(all) == 0 {
			delete(e.open, c.who)
		}
	}
}

// listener accepts connections for an entrance.
type listener struct {
	net.Listener
	entrance *entrance
}

func (e *entrance) listen(l net.Listener) net.Listener { return &listener{l, e} }

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		tcp, ok := conn.(*net.TCPConn)
		if !ok {
			return nil, errors.Join(fmt.Errorf("%T is no TCP connection", conn), conn.Close())
		}
		setUserTimeout(tcp)
		if c := l.entrance.enter(tcp); c != nil {
			return c, nil
		}
	}
}

// enter gives a connection its place among those that shake hands. It returns nil if the
// server takes no more.
func (e *entrance) enter(tcp *net.TCPConn) *tcpConn {
	c := &tcpConn{TCPConn: tcp, entrance: e}
	var gives net.Conn
	e.mu.Lock()
	switch {
	case e.closed:
		c, gives = nil, tcp
	case e.shaking.Len() >= e.bounds.shaking:
		oldest := e.shaking.Front().Value.(*tcpConn)
		e.leave(oldest)
		gives = oldest
		fallthrough
	default:
		c.place = e.shaking.PushBack(c)
	}
	e.mu.Unlock()
	if gives != nil {
		_ = gives.Close() // ends its handshake
	}
	return c
}

// setUserTimeout bounds how long sent bytes may go without an acknowledgement. gRPC
// does so itself only with connections whose type is TCP's.
func setUserTimeout(conn *net.TCPConn) {
	if raw, err := conn.SyscallConn(); err == nil {
		// A connection that has failed already is noticed at the next read.
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(keepaliveTimeout.Milliseconds()))
		})
	}
}

// ServerHandshake implements credentials.TransportCredentials. gRPC has given the
// connection a deadline.
func (e *entrance) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, ok := raw.(*tcpConn)
	if !ok {
		return nil, nil, fmt.Errorf("%T was not accepted here", raw)
	}
	material := e.end.Now()
	conn := tls.Server(c, material.Server())
	who, err := e.shakeHands(c, conn, material)
	if err != nil {
		e.refused(c, who, err)
		return nil, nil, err
	}
	return conn, peerComponent{credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, who}, nil
}

// shakeHands finds the component of a connection, and gives the connection its
// place.
func (e *entrance) shakeHands(c *tcpConn, conn *tls.Conn, material *access.Material) (who access.Component, err error) {
	if err := conn.Handshake(); err != nil {
		return who, err
	}
	state := conn.ConnectionState()
	if who, err = access.ClientOf(state); err != nil {
		return who, err
	}
	until, err := material.Verify(state.PeerCertificates)
	if err != nil {
		return who, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case c.place == nil:
		return who, errors.New("the connection gave way to others in its handshake")
	case len(e.open[who]) >= e.connections:
		return who, sandbox.Errorf(sandbox.CodeCapacity, "%s has %d connections already", who, e.connections)
	}
	e.leave(c)
	c.who, c.certs, c.material, c.until = who, state.PeerCertificates, material, until
	if e.open[who] == nil {
		e.open[who] = map[*tcpConn]bool{}
	}
	e.open[who][c] = true
	return who, nil
}

// refused records a connection that is refused. It leaves out connections on which
// the client sent nothing, as probes of a port do, and those that end with the
// server.
func (e *entrance) refused(c *tcpConn, who access.Component, err error) {
	if errors.Is(err, io.EOF) || e.api.serving.Err() != nil {
		return
	}
	event := audit.Event{Request: rand.Text(), Via: who.String(), Verb: "grpc:connect", Remote: c.RemoteAddr().String()}
	if !sandbox.HasCode(err, sandbox.CodeCapacity) {
		err = sandbox.Errorf(access.CodeUnauthenticated, "the connection is not one of a component").Because("%v", err)
	}
	e.api.auditRefused(&e.api.strangers, event, err)
}

// follow looks at the files of certificates until ctx ends.
func (e *entrance) follow(ctx context.Context) {
	tick := time.NewTicker(e.bounds.look)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			e.lookAt(time.Now())
		case <-ctx.Done():
			return
		}
	}
}

// lookAt reads files that have changed, and ends the connections whose
// certificates are no longer valid.
func (e *entrance) lookAt(now time.Time) {
	changed, err := e.end.Look()
	if err != nil {
		e.api.Log.Error("the certificates of the node's API stay as they were", "error", err)
	}
	if changed {
		e.api.Log.Info("the certificates of the node's API have changed")
	}
	e.sweep(now)
}

// sweep ends connections whose certificates have expired, or are not signed by the
// present CAs.
func (e *entrance) sweep(now time.Time) {
	material := e.end.Now()
	var all []*tcpConn
	e.mu.Lock()
	for _, conns := range e.open {
		all = slices.AppendSeq(all, maps.Keys(conns))
	}
	e.mu.Unlock()
	for _, c := range all {
		var err error
		if c.material != material {
			c.material = material
			c.until, err = material.Verify(c.certs)
		}
		if err == nil && now.After(c.until) {
			err = fmt.Errorf("its certificate has expired on %s", c.until.UTC().Format(time.RFC3339))
		}
		if err != nil {
			e.api.Log.Warn("a connection is cut", "via", c.who.String(), "remote", c.RemoteAddr().String(), "error", err)
			_ = c.Close() // this ends its calls
		}
	}
}

// close takes no more connections. It ends those that are still shaking hands, or all
// of them. gRPC would wait for each as long as its handshake may take.
func (e *entrance) close(all bool) {
	var ends []*tcpConn
	e.mu.Lock()
	e.closed = true
	for at := e.shaking.Front(); at != nil; at = at.Next() {
		ends = append(ends, at.Value.(*tcpConn))
	}
	if all {
		for _, conns := range e.open {
			ends = slices.AppendSeq(ends, maps.Keys(conns))
		}
	}
	e.mu.Unlock()
	for _, c := range ends {
		_ = c.Close() // this ends its calls
	}
}

// ClientHandshake implements credentials.TransportCredentials.
func (*entrance) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("these credentials are a server's")
}

// Info implements credentials.TransportCredentials.
func (*entrance) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

// Clone implements credentials.TransportCredentials.
func (e *entrance) Clone() credentials.TransportCredentials { return e }

// OverrideServerName implements credentials.TransportCredentials.
func (*entrance) OverrideServerName(string) error { return nil }
