package image

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Locks are flock(2)s. They exclude other processes and other goroutines of
// this process alike, since each opens the file itself. A lock ends with its
// owner, even if the owner is killed.

// lockFile waits for a lock on a file, which it makes if it is missing.
func lockFile(ctx context.Context, path string, how int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	if tryLock(f, how) == nil {
		return f, nil
	}
	got := make(chan error) // not buffered: a sent value was received
	go func() {
		err := flock(f, how)
		select {
		case got <- err:
		case <-ctx.Done(): // the caller has stopped waiting
			_ = f.Close()
		}
	}()
	select {
	case err := <-got:
		if err != nil {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
		}
		return f, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// lockMaking waits until it has the right to make an image of this key. Unused
// lock files are removed: a lock whose file was removed while we waited does
// not count.
func (s *Store) lockMaking(ctx context.Context, key string, waiting func()) (*os.File, error) {
	path := s.path(makingName, key+".lock")
	for {
		if f, err := os.Open(path); err == nil {
			if tryLock(f, unix.LOCK_SH) != nil {
				waiting()
			}
			if err := f.Close(); err != nil {
				return nil, err
			}
		}
		f, err := lockFile(ctx, path, unix.LOCK_EX)
		if err != nil {
			return nil, err
		}
		ours, err := f.Stat()
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		if there, err := os.Stat(path); err == nil && os.SameFile(ours, there) {
			return f, nil
		}
		if err := f.Close(); err != nil {
			return nil, err
		}
	}
}

func flock(f *os.File, how int) error {
	for {
		if err := unix.Flock(int(f.Fd()), how); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// tryLock fails with EWOULDBLOCK if another owner has a lock.
func tryLock(f *os.File, how int) error { return flock(f, how|unix.LOCK_NB) }
