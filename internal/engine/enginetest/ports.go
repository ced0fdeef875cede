package enginetest

import (
	"errors"
	"fmt"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
)

// testPorts: on every engine the agent connects to TCP ports inside. Data goes both
// ways, up to the end of each stream. The source's connections do not exist in a
// fork.
func (s *suite) testPorts(t *testing.T) {
	sb := s.fork(t, s.warm, engine.ForkOptions{})
	const port = 7778
	listen := func(sb engine.Sandbox) {
		t.Helper()
		sh(t, sb, fmt.Sprintf("nc -l -p %d -e cat </dev/null >/dev/null 2>&1 & while ! grep -q ':%04X ' /proc/net/tcp /proc/net/tcp6; do usleep 10000; done", port, port))
	}
	connect := func(sb engine.Sandbox) (*guestrpc.PortConn, error) {
		return sb.Agent().Connect(t.Context(), guestrpc.ConnectRequest{Port: port})
	}
	refused := func(sb engine.Sandbox) {
		t.Helper()
		_, err := connect(sb)
		var e *guestrpc.Error
		if !errors.As(err, &e) || e.Code != guestrpc.CodeFailedPrecondition {
			t.Errorf("connect to a port on which nothing listens: %v", err)
		}
	}
	refused(sb)
	listen(sb)
	conn, err := connect(sb)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	children, _ := liveFork(t, sb, engine.ForkOptions{})
	echoed(t, conn) // the source's connection goes on
	refused(sb)     // the server in the source has taken its only connection
	listen(children[0])
	other, err := connect(children[0])
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	echoed(t, other)
}
