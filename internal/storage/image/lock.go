package image

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Locks are flock(2)s: they exclude other processes and other goroutines of
// this one alike, since each takes its own open file, and end with their owner
// however it ends.

// lockFile waits for a lock on a file, which it makes if it is missing.
func lockFile(ctx context.Context, path string, how int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	if tryLock(f, how) == nil {
		return f, nil
	}
	got := make(chan error) // not buffered: what it takes in was received
	go func() {
		err := flock(f, how)
		select {
		case got <- err:
		case <-ctx.Done(): // nobody waits any more
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

// lockMaking waits until nobody else makes an image of this key. Files of locks
// are removed when nobody has them: one that was, while we waited, is no lock.
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

// tryLock fails with EWOULDBLOCK if someone else has a lock.
func tryLock(f *os.File, how int) error { return flock(f, how|unix.LOCK_NB) }
