package remote_test

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/access/accesstest"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/sandbox"
	nodeserver "agentrun.dev/internal/server/node"
	"agentrun.dev/internal/server/remote"
)

// mutual is a node that is served over mutual TLS.
type mutual struct {
	t       *testing.T
	ca      *accesstest.CA
	address string
}

// serveMutual serves a node under the name n1.
func serveMutual(t *testing.T, n *managertest.Node) *mutual {
	t.Helper()
	m := &mutual{t: t, ca: accesstest.NewCA(t)}
	end, err := access.OpenMutual(m.files("node/n1"))
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m.address = l.Addr().String()
	s := nodeserver.NewMutual(n.Config(), end)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return m
}

// files are those of a component of the node's CA, ROLE/NAME.
func (m *mutual) files(component string) access.MutualFiles {
	f := accesstest.NewFiles(m.t)
	f.WritePair(m.t, m.ca.Component(component))
	f.WriteCAs(m.t, m.ca)
	return access.MutualFiles(f)
}

// dial connects as a component.
func (m *mutual) dial(component string) *remote.Conn {
	return m.dialTo(remote.Target{Address: m.address, Node: "n1", Files: m.files(component)})
}

func (m *mutual) dialTo(target remote.Target) *remote.Conn {
	m.t.Helper()
	target.Look = 5 * time.Millisecond
	conn, err := remote.Dial(target)
	if err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			m.t.Error(err)
		}
	})
	return conn
}

// TestDialWrong: a node that is another one, or that does not know the caller, is
// unavailable. Targets that cannot be dialled are errors.
func TestDialWrong(t *testing.T) {
	m := serveMutual(t, managertest.New(t))
	other := serveMutual(t, managertest.New(t))
	stranger := accesstest.NewFiles(t)
	stranger.WritePair(t, other.ca.Component("controller/c"))
	stranger.WriteCAs(t, m.ca)
	for name, target := range map[string]remote.Target{
		"another node":       {Address: m.address, Node: "n2", Files: m.files("controller/c")},
		"another CA":         {Address: m.address, Node: "n1", Files: other.files("controller/c")},
		"a caller elsewhere": {Address: m.address, Node: "n1", Files: access.MutualFiles(stranger)},
	} {
		if _, err := remote.New(m.dialTo(target)).Node(t.Context()); !sandbox.HasCode(err, "unavailable") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := remote.Dial(remote.Target{Address: "node", Files: m.files("controller/c")}); err == nil || !strings.Contains(err.Error(), "port") {
		t.Errorf("no port: %v", err)
	}
	if _, err := remote.Dial(remote.Target{Address: m.address}); err == nil {
		t.Error("no files")
	}
	if _, err := remote.New(m.dial("controller/c")).Node(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestDialRenewed: calls that begin after new files are there go over a new connection.
// Calls that had begun go on, until their user closes the connection.
func TestDialRenewed(t *testing.T) {
	m := serveMutual(t, managertest.New(t))
	files := accesstest.Files(m.files("controller/c"))
	told := make(chan error, 10)
	conn := m.dialTo(remote.Target{Address: m.address, Files: access.MutualFiles(files), Failed: func(err error) { told <- err }})
	h := healthv1.NewHealthClient(conn)
	watch := func() (healthv1.Health_WatchClient, context.CancelFunc) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		w, err := h.Watch(ctx, &healthv1.HealthCheckRequest{})
		if err == nil {
			_, err = w.Recv()
		}
		if err != nil {
			t.Fatal(err)
		}
		return w, cancel
	}
	first, endFirst := watch()
	defer endFirst()
	if err := os.Remove(files.Cert); err != nil {
		t.Fatal(err)
	}
	if err := <-told; !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
	if _, err := remote.New(conn).Node(t.Context()); err != nil {
		t.Errorf("the files before do not go on: %v", err)
	}
	// As another component, which the node would tell from the first.
	files.WritePair(t, m.ca.Component("node/now"))
	for { // no event tells that it was read
		_, err := remote.New(conn).Node(t.Context())
		if sandbox.HasCode(err, sandbox.CodeDenied) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	second, endSecond := watch()
	defer endSecond()
	if _, err := h.Check(t.Context(), &healthv1.HealthCheckRequest{}); err != nil {
		t.Error(err)
	}
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	for _, w := range []healthv1.Health_WatchClient{first, second} {
		if _, err := w.Recv(); err == nil {
			t.Error("a watch goes on over a closed connection")
		}
	}
	if _, err := remote.New(conn).Node(t.Context()); !sandbox.HasCode(err, "unavailable") {
		t.Errorf("closed: %v", err)
	}
	if err := conn.Close(); err != nil {
		t.Errorf("closed twice: %v", err)
	}
}
