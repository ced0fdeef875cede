package remote_test

import (
	"net"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/sandbox"
	nodeserver "agentrun.dev/internal/server/node"
	"agentrun.dev/internal/server/remote"
	"agentrun.dev/internal/server/servertest"
)

// TestRemote: a manager passes the suite over gRPC, in full.
func TestRemote(t *testing.T) {
	for name, connect := range map[string]func(*testing.T) grpc.ClientConnInterface{
		"socket": func(t *testing.T) grpc.ClientConnInterface { return serve(t, managertest.New(t)) },
		"mutual TLS": func(t *testing.T) grpc.ClientConnInterface {
			return remote.As(serveMutual(t, managertest.New(t)).dial("gateway/g"), access.Acting{Principal: "gateway-key:aaaaaaaaaaaa", Role: access.RoleAdmin})
		},
	} {
		t.Run(name, func(t *testing.T) {
			servertest.Run(t, servertest.Target{
				Service:  remote.New(connect(t)),
				Template: sandbox.TemplateSpec{Image: "python", MilliCPUs: sandbox.DefaultMilliCPUs, Memory: sandbox.DefaultMemory},
				Owns:     name == "socket", // the other one is a gateway
			})
		})
	}
}

// TestGone: a node that does not answer is an error.
func TestGone(t *testing.T) {
	conn := serve(t, managertest.New(t))
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := remote.New(conn).Node(t.Context()); !sandbox.HasCode(err, "unavailable") {
		t.Errorf("%v", err)
	}
}

// serve connects with a node over its socket.
func serve(t *testing.T, n *managertest.Node) *grpc.ClientConn {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "n")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := nodeserver.New(n.Config())
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close() // a test may have closed it
		s.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return conn
}
