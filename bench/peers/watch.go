package peers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// watch waits for a file to appear in a folder.
type watch struct {
	events *os.File
	path   string
}

func watchFor(dir, name string) (*watch, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", dir, err)
	}
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_CREATE|unix.IN_MOVED_TO); err != nil {
		return nil, errors.Join(fmt.Errorf("watch %s: %w", dir, err), unix.Close(fd))
	}
	return &watch{events: os.NewFile(uintptr(fd), "inotify"), path: filepath.Join(dir, name)}, nil
}

func (w *watch) close() error { return w.events.Close() }

var errEnded = errors.New("it ended")

// wait returns once the file exists. ended is closed if it will never exist.
func (w *watch) wait(ctx context.Context, ended <-chan struct{}) error {
	appeared := make(chan error, 1)
	go func() {
		events := make([]byte, 4096)
		for {
			if _, err := os.Lstat(w.path); err == nil {
				appeared <- nil
				return
			}
			if _, err := w.events.Read(events); err != nil {
				appeared <- err
				return
			}
		}
	}()
	select {
	case err := <-appeared:
		return err
	case <-ended:
		return errEnded
	case <-ctx.Done():
		return ctx.Err()
	}
}
