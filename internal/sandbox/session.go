package sandbox

import (
	"context"
	"io"

	"agentrun.dev/internal/guest/guestrpc"
)

// Session is a sandbox that runs and that somebody uses, until Close. Wherever the
// sandbox is, all that is done inside goes through its agent.
type Session interface {
	// Record is the sandbox as it was when the session began.
	Record() Sandbox
	// Agent speaks to what is inside. Execs and executions of code that it starts
	// go on after the session.
	Agent() *guestrpc.Client
	// Connect connects to a TCP port of the sandbox's loopback. The connection must
	// be closed before the session is.
	Connect(ctx context.Context, port uint16) (Conn, error)
	// Stats is what the sandbox costs.
	Stats(ctx context.Context) (Stats, error)
	Close()
}

// Conn is a connection to a program in a sandbox.
type Conn interface {
	io.ReadWriteCloser
	// CloseWrite tells the program that nothing more comes.
	CloseWrite() error
	// Done is closed when the connection has ended, on either side.
	Done() <-chan struct{}
}
