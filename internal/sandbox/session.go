package sandbox

import (
	"context"
	"io"

	"agentrun.dev/internal/guest/guestrpc"
)

// Session is the use of a running sandbox by a client, until Close. All work
// inside of the sandbox goes through its agent, on any node.
type Session interface {
	// Record is the sandbox's record at the beginning of the session.
	Record() Sandbox
	// Agent is the client of the sandbox's agent. Execs and executions of code
	// that it starts continue after the session.
	Agent() *guestrpc.Client
	// Connect connects to a TCP port of the sandbox's loopback. The connection must
	// be closed before the session is.
	Connect(ctx context.Context, port uint16) (Conn, error)
	// Stats is the sandbox's use of its host.
	Stats(ctx context.Context) (Stats, error)
	Close()
}

// Conn is a connection to a program in a sandbox.
type Conn interface {
	io.ReadWriteCloser
	// CloseWrite tells the program that no more data comes.
	CloseWrite() error
	// Done is closed when the connection has ended, on either side.
	Done() <-chan struct{}
}
