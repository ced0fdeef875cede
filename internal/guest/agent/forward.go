package agent

import (
	"context"
	"io"

	"agentrun.dev/internal/guest/guestmux"
	"agentrun.dev/internal/guest/guestrpc"
)

// ServeChannel serves the host over the one channel that a container has: its
// port 1024 is the agent, and any other port is a TCP port of the sandbox's
// loopback. It returns when the channel has ended.
func (s *Server) ServeChannel(ctx context.Context, ch io.ReadWriteCloser) error {
	return guestmux.Serve(ch, func(port uint32) (func(*guestmux.Stream), error) {
		if port == guestrpc.AgentPort {
			if !s.admit() {
				return nil, fail(ErrTooMany, "connect to", "the agent", "16 connections are open")
			}
			return func(st *guestmux.Stream) { s.serve(ctx, st) }, nil
		}
		conn, err := dialLoopback(ctx, port)
		if err != nil {
			return nil, err
		}
		return func(st *guestmux.Stream) { forward(st, conn) }, nil
	})
}

// forward moves bytes both ways until both have ended, or one has failed.
func forward(st *guestmux.Stream, conn *Conn) {
	defer st.Close()
	defer conn.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		if _, err := copyGrowing(conn, st); err != nil {
			_ = conn.Close() // ends the other direction
			return
		}
		_ = conn.CloseWrite() // fails if the connection is gone
	}()
	if _, err := copyGrowing(st, conn); err != nil {
		_ = st.Close()
	} else {
		_ = st.CloseWrite() // fails if the channel is gone
	}
	<-done
}
