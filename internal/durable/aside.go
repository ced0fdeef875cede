package durable

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// SetAside reserves room on the disk for a file from an offset on, which may be beyond its
// end. Data that is written there later fits, even if the disk is full by then. The file's
// size does not change. The error is ErrNoAside if the file system cannot reserve room.
//
// On a file system that never writes in place (btrfs), only the first write to the room
// is sure to fit.
func SetAside(f *os.File, from, size int64) error {
	for {
		err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, from, size)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS):
			return ErrNoAside
		case err != nil:
			return fmt.Errorf("set room aside for %s: %w", f.Name(), err)
		}
		return nil
	}
}

// ErrNoAside means that the file system cannot reserve room for files.
var ErrNoAside = errors.New("the file system sets no room aside for files")

// ShareOf is a fraction of the size of a file's disk, but at most most.
func ShareOf(f *os.File, part uint64, most int64) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return 0, fmt.Errorf("look at the disk of %s: %w", f.Name(), err)
	}
	return int64(min(st.Blocks*uint64(st.Bsize)/part, uint64(most))), nil
}

// Aside is the reserved room of a file that grows at its end. It is not safe for concurrent
// use.
type Aside struct {
	// Most is the size of the reserved room in bytes.
	Most int64

	upTo int64 // the offset at which the room ends
	none bool  // the file system cannot reserve room
}

// Keep reserves room beyond end, the end of the file's content. It reports whether
// less than half of the room is left and the disk has no more.
func (a *Aside) Keep(f *os.File, end int64) (short bool, err error) {
	if a.none || end+a.Most/2 < a.upTo {
		return false, nil
	}
	for _, size := range []int64{a.Most, a.Most / 2} { // if all does not fit, half of it may
		err = SetAside(f, end, size)
		switch {
		case err == nil:
			a.upTo = end + size
			return false, nil
		case errors.Is(err, ErrNoAside):
			a.none = true
			return false, nil
		case !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT):
			return false, err
		}
	}
	return true, nil
}
