package agent

import (
	"context"
	"errors"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/guest/guestrpc"
)

// Connect implements guestrpc.Handler: it moves bytes between the host and a
// program that listens on a TCP port of the loopback.
func (s *Server) Connect(ctx context.Context, req *guestrpc.ConnectRequest, st *guestrpc.PortStream) error {
	conn, err := dialLoopback(ctx, uint32(req.Port))
	if err != nil {
		return rpcError(err)
	}
	defer conn.Close()
	if err := st.Connected(); err != nil {
		return err
	}
	sent := make(chan error, 1)
	go func() {
		_, err := copyGrowing(conn, st)
		if err != nil {
			_ = conn.Close() // ends the other direction
		} else {
			_ = conn.CloseWrite() // fails if the connection is gone
		}
		sent <- err
	}()
	if _, err := copyGrowing(st, conn); err != nil {
		// The other direction ends with the stream, which ends with this call.
		return rpcError(failed("read from", portName(uint32(req.Port)), err))
	}
	if err := st.CloseWrite(); err != nil {
		return err
	}
	// A program that has closed its side may still read.
	if err := <-sent; err != nil {
		return rpcError(failed("write to", portName(uint32(req.Port)), err))
	}
	return nil
}

func portName(port uint32) string { return "port " + strconv.FormatUint(uint64(port), 10) }

// dialLoopback connects to a TCP port of this sandbox, on either loopback
// address.
func dialLoopback(ctx context.Context, port uint32) (*Conn, error) {
	thing := portName(port)
	if port == 0 || port > 65535 {
		return nil, fail(ErrInvalid, "connect to", thing, "want 1 to 65535")
	}
	conn, err := dialTCP(ctx, unix.AF_INET, &unix.SockaddrInet4{Port: int(port), Addr: [4]byte{127, 0, 0, 1}})
	if err != nil {
		six, err6 := dialTCP(ctx, unix.AF_INET6, &unix.SockaddrInet6{Port: int(port), Addr: [16]byte{15: 1}})
		if err6 == nil {
			return six, nil
		}
	}
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		return nil, fail(ErrClosed, "connect to", thing, "nothing listens on it")
	case err != nil:
		return nil, failed("connect to", thing, err)
	}
	return conn, nil
}

// dialTCP connects without blocking a thread, because a program that listens and does
// not accept can keep a connection waiting for minutes.
func dialTCP(ctx context.Context, family int, addr unix.Sockaddr) (*Conn, error) {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	begun := unix.Connect(fd, addr)
	if begun != nil && begun != unix.EINPROGRESS {
		unix.Close(fd)
		return nil, begun
	}
	conn, err := NewConn(fd)
	if err != nil || begun == nil {
		return conn, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	err = conn.connected()
	if !stop() && err == nil {
		err = unix.ECANCELED
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

// connected waits until a connection is made.
func (c *Conn) connected() error {
	var result error
	err := c.raw.Write(func(fd uintptr) bool {
		pending, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		switch {
		case err != nil:
			result = err
		case pending != 0:
			result = syscall.Errno(pending)
		default:
			if _, err := unix.Getpeername(int(fd)); err == unix.ENOTCONN {
				return false
			} else if err != nil {
				result = err
			}
		}
		return true
	})
	return errors.Join(err, result)
}
