package node

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/access/accesstest"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/server/remote"
)

// watched is a call that lasts until its connection is cut.
func watched(t *testing.T, conn grpc.ClientConnInterface) healthv1.Health_WatchClient {
	t.Helper()
	w := managertest.Must(healthv1.NewHealthClient(conn).Watch(t.Context(), &healthv1.HealthCheckRequest{}))(t)
	managertest.Must(w.Recv())(t)
	return w
}

// grpcTLS are the credentials of a client with a certificate, which takes any server.
func grpcTLS(n *mutualNode, cert tls.Certificate) credentials.TransportCredentials {
	cfg := n.settings(cert)
	cfg.InsecureSkipVerify = true
	return credentials.NewTLS(cfg)
}

// signed reports whether all connections of a component, of which there are some, have
// certificates of a CA.
func (n *mutualNode) signed(c access.Component, by *accesstest.CA) bool {
	e := n.server.entrance
	e.mu.Lock()
	defer e.mu.Unlock()
	for conn := range e.open[c] {
		if _, err := conn.certs[0].Verify(x509.VerifyOptions{Roots: by.Pool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
			return false
		}
	}
	return len(e.open[c]) > 0
}

// shown is the certificate that the server shows to a new connection.
func (n *mutualNode) shown(cfg *tls.Config) *x509.Certificate {
	n.T.Helper()
	cfg.NextProtos, cfg.InsecureSkipVerify = []string{"h2"}, true
	conn, err := tls.Dial("tcp", n.address, cfg)
	if err != nil {
		n.T.Fatal(err)
	}
	defer func() { _ = conn.Close() }() // no byte was sent
	return conn.ConnectionState().PeerCertificates[0]
}

// TestMutualRotation: certificate, key and CA of both ends are replaced under load, up
// to another CA: no call fails. New connections have the new ones; connections that
// hold a certificate of a CA that was removed are cut.
func TestMutualRotation(t *testing.T) {
	n := newMutualNode(t, bounds{handshake: defaultBounds.handshake, shaking: 64, connections: 64, look: 10 * time.Millisecond})
	fresh := accesstest.NewCA(t)
	type caller struct {
		access.Component
		files accesstest.Files
	}
	var callers []caller
	var calls, failed atomic.Int64
	var load sync.WaitGroup
	stop := make(chan struct{})
	for _, role := range []access.Role{access.RoleController, access.RoleGateway} {
		c := caller{access.Component{Role: role, Name: "x"}, accesstest.NewFiles(t)}
		c.files.WritePair(t, n.ca.Component(string(role)+"/x"))
		c.files.WriteCAs(t, n.ca)
		callers = append(callers, c)
		conn := managertest.Must(remote.Dial(remote.Target{Address: n.address, Node: "n1", Files: access.MutualFiles(c.files), Look: 10 * time.Millisecond}))(t)
		t.Cleanup(func() {
			if err := conn.Close(); err != nil {
				t.Error(err)
			}
		})
		for range 3 {
			load.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					if _, err := nodev1.NewNodeClient(conn).GetNode(t.Context(), &nodev1.GetNodeRequest{}); err != nil {
						failed.Add(1)
						t.Errorf("a call under load: %v", err)
						return
					}
					calls.Add(1)
				}
			})
		}
	}
	defer func() {
		close(stop)
		load.Wait()
	}()
	some := func() { // calls since now
		before := calls.Load()
		n.Eventually(func() bool { return calls.Load() > before+20 || failed.Load() > 0 })
	}
	some()
	laggard := n.as("node/laggard") // its certificate is never renewed
	cut := watched(t, laggard)

	// A new certificate of the same CA, and files that cannot be used in between.
	accesstest.Replace(t, n.files.CA, []byte("half a file"))
	n.Eventually(func() bool { return strings.Contains(n.log.String(), "stay as they were") })
	some()
	renewed := n.ca.Component("node/n1")
	n.files.WritePair(t, renewed)
	n.files.WriteCAs(t, n.ca)
	n.Eventually(func() bool { return n.shown(n.settings(n.ca.Component("node/a"))).Equal(renewed.Leaf) })
	some()

	// Another CA beside the first one, everywhere; then certificates of it.
	n.files.WriteCAs(t, n.ca, fresh)
	before := map[*tcpConn]bool{}
	n.server.entrance.mu.Lock()
	for _, c := range callers {
		for conn := range n.server.entrance.open[c.Component] {
			before[conn] = true
		}
	}
	n.server.entrance.mu.Unlock()
	for _, c := range callers {
		c.files.WriteCAs(t, n.ca, fresh)
	}
	n.Eventually(func() bool { // both call over connections that know both
		n.server.entrance.mu.Lock()
		defer n.server.entrance.mu.Unlock()
		for _, c := range callers {
			for conn := range n.server.entrance.open[c.Component] {
				if before[conn] {
					return false
				}
			}
		}
		return true
	})
	n.Eventually(func() bool {
		conn := n.dial(grpcTLS(n, fresh.Component("node/b")))
		defer func() { _ = conn.Close() }() // closed again by the test's end
		return check(t.Context(), conn) == nil
	})
	moved := fresh.Component("node/n1")
	n.files.WritePair(t, moved)
	n.Eventually(func() bool { return n.shown(n.settings(fresh.Component("node/a"))).Equal(moved.Leaf) })
	some()
	for _, c := range callers {
		c.files.WritePair(t, fresh.Component(string(c.Role)+"/x"))
	}
	for _, c := range callers {
		n.Eventually(func() bool { return n.signed(c.Component, fresh) })
	}
	some()
	if err := check(t.Context(), laggard); err != nil {
		t.Errorf("a certificate of the first CA is refused too early: %v", err)
	}

	// The first CA goes.
	for _, files := range []accesstest.Files{n.files, callers[0].files, callers[1].files} {
		files.WriteCAs(t, fresh)
	}
	if _, err := cut.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("a connection of a CA that was removed: %v", err)
	}
	some()
	if err := check(t.Context(), n.dial(grpcTLS(n, n.ca.Component("node/c")))); status.Code(err) != codes.Unavailable {
		t.Errorf("a certificate of a CA that was removed: %v", err)
	}
	n.Eventually(func() bool { return n.log.String() != "" && strings.Contains(n.log.String(), "a connection is cut") })
	some()
}

// TestMutualExpiry: a connection ends with its certificate; others go on.
func TestMutualExpiry(t *testing.T) {
	n := newMutualNode(t, bounds{handshake: defaultBounds.handshake, shaking: 64, connections: 64, look: time.Hour})
	short := n.ca.Issue(accesstest.Spec{URIs: []string{"spiffe://agentrun.dev/node/short"}, Until: time.Now().Add(time.Hour)})
	long := n.ca.Issue(accesstest.Spec{URIs: []string{"spiffe://agentrun.dev/node/long"}, Until: time.Now().Add(3 * time.Hour)})
	ends, stays := watched(t, n.dial(grpcTLS(n, short))), n.dial(grpcTLS(n, long))
	watched(t, stays)
	e := n.server.entrance
	e.lookAt(time.Now())
	e.mu.Lock()
	if len(e.open) != 2 {
		t.Errorf("%d components", len(e.open))
	}
	e.mu.Unlock()
	e.lookAt(time.Now().Add(2 * time.Hour))
	if _, err := ends.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("%v", err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.open) != 1 || len(e.open[access.Component{Role: access.RoleNode, Name: "long"}]) != 1 {
		t.Errorf("%v", e.open)
	}
	if err := check(t.Context(), stays); err != nil {
		t.Error(err)
	}
}

// TestMutualFilesGone: files that are missing change nothing.
func TestMutualFilesGone(t *testing.T) {
	n := newMutualNode(t, quick)
	w := n.as("node/a")
	watched(t, w)
	if err := os.Remove(n.files.CA); err != nil {
		t.Fatal(err)
	}
	n.Eventually(func() bool { return strings.Contains(n.log.String(), "stay as they were") })
	n.serves("node/b")
	if err := check(t.Context(), w); err != nil {
		t.Error(err)
	}
}
