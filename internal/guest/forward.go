package guest

import (
	"context"
	"io"
	"strconv"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/guestmux"
	"agentrun.dev/internal/guestrpc"
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
		conn, err := dialLoopback(port)
		if err != nil {
			return nil, err
		}
		return func(st *guestmux.Stream) { forward(st, conn) }, nil
	})
}

// dialLoopback connects to a TCP port of this sandbox.
func dialLoopback(port uint32) (*Conn, error) {
	thing := "port " + strconv.FormatUint(uint64(port), 10)
	if port == 0 || port > 65535 {
		return nil, fail(ErrInvalid, "connect to", thing, "want 1 to 65535")
	}
	four := unix.SockaddrInet4{Port: int(port), Addr: [4]byte{127, 0, 0, 1}}
	six := unix.SockaddrInet6{Port: int(port), Addr: [16]byte{15: 1}}
	fd, err := dialTCP(unix.AF_INET, &four)
	if err != nil {
		if other, err6 := dialTCP(unix.AF_INET6, &six); err6 == nil {
			fd, err = other, nil
		}
	}
	if err != nil {
		return nil, failed("connect to", thing, err)
	}
	return NewConn(fd)
}

func dialTCP(family int, addr unix.Sockaddr) (int, error) {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.Connect(fd, addr); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
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
