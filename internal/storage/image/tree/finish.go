package tree

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// remember stores a folder's time, which is set at the end.
func (t *Tree) remember(full string, mtime time.Time) error {
	info, err := t.root.Lstat(orRoot(full))
	if err != nil {
		return err
	}
	t.times[full] = folderTime{mtime: mtime, inode: inode(info)}
	return nil
}

func inode(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Ino
	}
	return 0
}

// setTimes sets the times of all folders that still exist.
func (t *Tree) setTimes() error {
	for full, want := range t.times {
		info, err := t.root.Lstat(orRoot(full))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || err == nil && (!info.IsDir() || inode(info) != want.inode) {
			continue // a later layer has removed it
		}
		if err != nil {
			return err
		}
		if err := t.setTime(full, want.mtime); err != nil {
			return fmt.Errorf("set time of %q: %w", printable(full), err)
		}
	}
	return nil
}

func (t *Tree) setTime(full string, mtime time.Time) error {
	stamp, err := timespec(mtime)
	if err != nil {
		return err
	}
	f, err := t.root.OpenFile(orRoot(full), os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.UtimesNanoAt(int(f.Fd()), "", []unix.Timespec{stamp, stamp}, unix.AT_EMPTY_PATH)
}

// MakeFolder makes a folder that the image's configuration names, such as the
// working folder, unless the name exists.
func (t *Tree) MakeFolder(name string) error {
	// The name comes from the image's configuration, not from an archive.
	defer func(strict bool) { t.limits.AbsoluteNames = strict }(t.limits.AbsoluteNames)
	t.limits.AbsoluteNames = true
	clean, err := t.cleanName(name)
	if err == nil {
		_, err = t.folder(clean, &layer{seen: map[string]mark{}})
	}
	if err != nil {
		return fmt.Errorf("make folder %q: %w", printable(name), err)
	}
	return nil
}
