package agent

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// Remove removes a file, link or empty folder. With recursive it also removes the
// contents of a folder. It never follows a symbolic link. It refuses to remove or to
// enter a mount point: "/", /proc, /sys, /dev, a volume.
func (f *Files) Remove(path string, recursive bool) error {
	path, err := checkPath("remove", path)
	if err != nil {
		return err
	}
	if path == "/" {
		return fail(ErrInvalid, "remove", path, "the root folder cannot be removed")
	}
	dir, name, err := splitPath("remove", path)
	if err != nil {
		return err
	}
	err = f.id.do(func() error {
		fd, err := open(unix.AT_FDCWD, dir, unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if root, err := isMountRoot(fd, name); err != nil || root {
			if err == nil {
				err = fail(ErrBusy, "remove", path, "something is mounted there")
			}
			return err
		}
		if recursive {
			return removeAny(fd, name)
		}
		err = unix.Unlinkat(fd, name, 0)
		if err == syscall.EISDIR {
			err = unix.Unlinkat(fd, name, unix.AT_REMOVEDIR)
		}
		return err
	})
	return failed("remove", path, err)
}

// isMountRoot asks the kernel whether a filesystem is mounted at dir/name.
func isMountRoot(dir int, name string) (bool, error) {
	var stx unix.Statx_t
	if err := unix.Statx(dir, name, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, 0, &stx); err != nil {
		return false, err
	}
	return stx.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

// removeAny removes dir/name and everything in it.
func removeAny(dir int, name string) error {
	descend, err := removeOne(dir, name)
	if err != nil || !descend {
		return err
	}
	return removeTree(dir, name)
}

// removeOne removes dir/name, unless it is a folder with contents; then it returns
// descend. Removing an empty folder takes no right to read it.
func removeOne(dir int, name string) (descend bool, err error) {
	err = unix.Unlinkat(dir, name, 0)
	if err != syscall.EISDIR {
		return false, err
	}
	err = unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
	switch err {
	case syscall.ENOTEMPTY, syscall.EEXIST:
		return true, nil
	case syscall.EBUSY:
		return false, fail(ErrBusy, "remove", name, "something is mounted there")
	}
	return false, err
}

// level is a folder on the way down: its name, and the folder it is in.
type level struct {
	name     string
	dev, ino uint64
}

// removeTree empties and removes dir/name. Only one folder is open at a time, however
// deep the tree: the way back up is "..", and it is checked to lead where we came
// from, so that a folder that is moved away meanwhile cannot lead to the removal of
// other files.
func removeTree(dir int, name string) error {
	var way []level
	fd, err := openFolder(dir, name)
	if err != nil {
		return err
	}
	defer func() { unix.Close(fd) }()
	for {
		sub, removed, err := emptyFolder(fd)
		if err != nil {
			return err
		}
		if sub != "" {
			var st unix.Stat_t
			if err := unix.Fstat(fd, &st); err != nil {
				return err
			}
			next, err := openFolder(fd, sub)
			if err == syscall.ENOENT {
				continue
			}
			if err != nil {
				return failed("remove", sub, err)
			}
			way = append(way, level{sub, st.Dev, st.Ino})
			unix.Close(fd)
			fd = next
			continue
		}
		if removed {
			// Removing while reading may skip entries: look again.
			if _, err := unix.Seek(fd, 0, unix.SEEK_SET); err != nil {
				return err
			}
			continue
		}
		if len(way) == 0 {
			return ignoreGone(unix.Unlinkat(dir, name, unix.AT_REMOVEDIR))
		}
		last := way[len(way)-1]
		way = way[:len(way)-1]
		up, err := open(fd, "..", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		if err != nil {
			return err
		}
		unix.Close(fd)
		fd = up
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return err
		}
		if st.Dev != last.dev || st.Ino != last.ino {
			return fail(ErrBusy, "remove", last.name, "it was moved while it was being removed")
		}
		if err := ignoreGone(unix.Unlinkat(fd, last.name, unix.AT_REMOVEDIR)); err != nil && err != syscall.ENOTEMPTY {
			return err
		}
	}
}

func openFolder(dir int, name string) (int, error) {
	root, err := isMountRoot(dir, name)
	if err != nil {
		return -1, err
	}
	if root {
		return -1, fail(ErrBusy, "remove", name, "something is mounted there")
	}
	return open(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
}

// emptyFolder removes entries until it meets a folder with content.
func emptyFolder(fd int) (sub string, removed bool, err error) {
	scanErr := eachName(fd, func(name []byte) bool {
		n := string(name)
		var descend bool
		descend, err = removeOne(fd, n)
		switch {
		case descend:
			sub = n
			return false
		case ignoreGone(err) != nil:
			err = failed("remove", n, err)
			return false
		}
		err, removed = nil, true
		return true
	})
	if err == nil {
		err = scanErr
	}
	return sub, removed, err
}

func ignoreGone(err error) error {
	if err == syscall.ENOENT {
		return nil
	}
	return err
}
