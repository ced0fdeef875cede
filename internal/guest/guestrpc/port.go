package guestrpc

import "context"

// ConnectRequest asks for a connection to a TCP port of the guest's loopback.
type ConnectRequest struct {
	Port uint16
}

func (m *ConnectRequest) visit(c *visitor) { number(c, "port", &m.Port, 1<<16-1) }

// PortConn is a connection to a port in the guest. One goroutine may read and
// one may write at a time; Close ends both.
type PortConn struct{ st *stream }

// Connect connects to a port of the guest's loopback. ctx bounds connecting only, not
// the connection. If no program listens on the port, the code of the error is
// [CodeFailedPrecondition].
func (c *Client) Connect(ctx context.Context, req ConnectRequest) (*PortConn, error) {
	st, err := c.openStreaming(ctx, MethodConnect, &req, &empty{})
	if err != nil {
		return nil, err
	}
	st.leave()
	return &PortConn{st}, nil
}

// Read returns io.EOF once the program has closed its side.
func (p *PortConn) Read(b []byte) (int, error) { return p.st.read(Stdout, b) }

func (p *PortConn) Write(b []byte) (int, error) { return p.st.write(Stdin, b) }

// CloseWrite tells the program that no more bytes will come.
func (p *PortConn) CloseWrite() error { return p.st.closeWrite(Stdin) }

// Done is closed when the connection has ended, on either side.
func (p *PortConn) Done() <-chan struct{} { return p.st.done }

// Close ends the connection at once. It never fails.
func (p *PortConn) Close() error {
	p.st.abort(ErrClosed)
	return nil
}

// PortStream is the agent's side of a connection.
type PortStream struct{ st *stream }

// Connected accepts the call. It must precede any data.
func (s *PortStream) Connected() error { return s.st.sendHeaders(&empty{}) }

// Read reads bytes from the host. io.EOF means that no more bytes will come, and any
// other error that the host has left.
func (s *PortStream) Read(b []byte) (int, error) { return s.st.read(Stdin, b) }

// Write waits while the host does not read.
func (s *PortStream) Write(b []byte) (int, error) { return s.st.write(Stdout, b) }

// CloseWrite tells the host that no more bytes will come.
func (s *PortStream) CloseWrite() error { return s.st.closeWrite(Stdout) }
