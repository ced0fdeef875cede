package debian

import (
	"io/fs"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// newestBefore is the time of the newest file that is older than the build:
// packages bring their files' times, so that it is the same whenever the same
// packages are installed.
func newestBefore(root string, start time.Time) (newest time.Time, err error) {
	err = filepath.WalkDir(root, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if m := info.ModTime(); m.Before(start) && m.After(newest) {
			newest = m
		}
		return nil
	})
	return newest.Truncate(time.Second), err
}

// clampTimes makes nothing newer than epoch.
func clampTimes(root string, epoch time.Time) error {
	stamp := unix.NsecToTimespec(epoch.UnixNano())
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil || !info.ModTime().After(epoch) {
			return err
		}
		return unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{stamp, stamp}, unix.AT_SYMLINK_NOFOLLOW)
	})
}
