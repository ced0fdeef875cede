package durable

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// SetAside gives a file room on its disk from an offset on, beyond its end perhaps: what is
// written there later fits, also where the disk is full by then. The file's size stays. A
// file system that cannot do that is ErrNoAside.
//
// On one that never writes in place (btrfs) only what is written there for the first time
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

// ErrNoAside says that a file system sets no room aside.
var ErrNoAside = errors.New("the file system sets no room aside for files")

// ShareOf is a part of the disk that a file is on, and most if that is less.
func ShareOf(f *os.File, part uint64, most int64) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return 0, fmt.Errorf("look at the disk of %s: %w", f.Name(), err)
	}
	return int64(min(st.Blocks*uint64(st.Bsize)/part, uint64(most))), nil
}

// Aside is the room that is set aside for a file which grows at its end. It is not safe for
// concurrent use.
type Aside struct {
	// Most is how much is set aside, in bytes.
	Most int64

	upTo int64 // the offset at which the room ends
	none bool  // the file system sets none aside
}

// Keep sees to it that there is room beyond the end of what is in the file. It reports
// whether less than half of it is left and the disk has no more.
func (a *Aside) Keep(f *os.File, end int64) (short bool, err error) {
	if a.none || end+a.Most/2 < a.upTo {
		return false, nil
	}
	for _, size := range []int64{a.Most, a.Most / 2} { // half of it may be there
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
