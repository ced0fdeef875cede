package egress

import (
	"net"

	"agentrun.dev/internal/network/stack"
)

// outside is the connection to a remote. It counts the bytes that are read and
// written through it. stack.Splice uses the Conn directly, and counts by itself.
type outside struct {
	net.Conn
	bytes *stack.Counters
}

func (o *outside) Read(b []byte) (int, error) {
	n, err := o.Conn.Read(b)
	o.bytes.Received.Add(int64(n))
	return n, err
}

func (o *outside) Write(b []byte) (int, error) {
	n, err := o.Conn.Write(b)
	o.bytes.Sent.Add(int64(n))
	return n, err
}

// abort closes with a RST instead of a FIN, so that the remote does not take the
// bytes so far for a complete stream.
func (o *outside) abort() {
	if tcp, ok := o.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = o.Close()
}

// splice moves bytes both ways until both directions have ended.
func (o *outside) splice(inside stack.Conn) Outcome {
	switch stack.Splice(inside, o.Conn, o.bytes) {
	case stack.ResetInside:
		return ResetBySandbox
	case stack.ResetOutside:
		return ResetByRemote
	default:
		return Closed
	}
}
