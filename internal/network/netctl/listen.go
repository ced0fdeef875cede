package netctl

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
)

// Listen makes a socket at path for a netd that is about to be started. Who may
// connect is decided by the folder's permissions, and by the netd itself.
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

// throughFolder reaches the socket through its folder: a socket's path has at most
// 107 bytes, a folder's any number.
func throughFolder(path string, do func(short string) error) error {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }() // only a way
	return do("/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + filepath.Base(path))
}
