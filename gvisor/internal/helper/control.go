package helper

import (
	"errors"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/control/client"
	"gvisor.dev/gvisor/pkg/urpc"
)

// connect opens a connection to gVisor's kernel.
func (s *sandboxed) connect() (*urpc.Client, error) {
	path := s.cont.Sandbox.GetControlSocketPath()
	if path == "" {
		return nil, errors.New("gVisor's kernel has no control socket")
	}
	// The path may be too long for a socket's address.
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	defer func() { _ = unix.Close(fd) }()
	conn, err := client.ConnectTo("/proc/self/fd/" + strconv.Itoa(fd))
	if err != nil {
		return nil, fmt.Errorf("connect to gVisor's kernel: %w", err)
	}
	return conn, nil
}

// tell makes gVisor's kernel call a method without arguments, over a connection that
// is kept, because a claim waits for the call. The caller holds s.mu.
func (s *sandboxed) tell(method string) error {
	if s.control == nil {
		conn, err := s.connect()
		if err != nil {
			return err
		}
		s.control = conn
	}
	return s.control.Call(method, nil, nil)
}
