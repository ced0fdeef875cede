package netctl

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
)

// Listen makes a socket at path before a netd is started. The folder's permissions,
// and the netd itself, decide which processes may connect.
func Listen(path string) (*os.File, error) {
	var file *os.File
	err := throughFolder(path, func(short string) error {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: short, Net: "unix"})
		if err != nil {
			return err
		}
		l.SetUnlinkOnClose(false)
		defer func() { _ = l.Close() }() // the copy goes on
		file, err = l.File()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen on control socket %s: %w", path, err)
	}
	return file, nil
}

// dial connects to a netd that listens at path.
func dial(ctx context.Context, path string) (*Conn, error) {
	var conn net.Conn
	err := throughFolder(path, func(short string) (err error) {
		conn, err = new(net.Dialer).DialContext(ctx, "unix", short)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("connect to control socket %s: %w", path, err)
	}
	return NewConn(conn.(*net.UnixConn)), nil
}

// throughFolder reaches the socket through a descriptor of its folder, because a
// socket's path has at most 107 bytes, while a folder's path may be longer.
func throughFolder(path string, do func(short string) error) error {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }() // only used as a path
	return do("/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + filepath.Base(path))
}
