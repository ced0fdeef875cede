package agent

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// maxCopyDepth bounds the folders a copy holds open, two descriptors each.
const maxCopyDepth = 256

// Move renames a file, folder or link. It replaces an existing file at to only with
// overwrite. Then the rules of rename(2) apply: a folder only replaces an empty
// folder. Between filesystems it copies beside the target, renames the copy into
// place and removes the source. Such a copy loses extended attributes and hard links.
func (f *Files) Move(from, to string, overwrite bool) error {
	from, err := checkPath("move", from)
	if err != nil {
		return err
	}
	if to, err = checkPath("move", to); err != nil {
		return err
	}
	fromDir, fromName, err := splitPath("move", from)
	if err != nil {
		return err
	}
	toDir, toName, err := splitPath("move", to)
	if err != nil {
		return err
	}
	err = f.id.do(func() error {
		src, err := open(unix.AT_FDCWD, fromDir, unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return failed("move", from, err)
		}
		defer unix.Close(src)
		dst, err := open(unix.AT_FDCWD, toDir, unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return failed("move to", to, err)
		}
		defer unix.Close(dst)
		err = rename(src, fromName, dst, toName, overwrite)
		if err == syscall.EXDEV {
			err = moveAcross(src, fromName, dst, toName, overwrite)
		}
		if err == syscall.EEXIST || err == syscall.ENOTEMPTY {
			return failed("move to", to, err)
		}
		return err
	})
	return failed("move", from, err)
}

func moveAcross(src int, from string, dst int, to string, overwrite bool) error {
	if inside, err := isInside(dst, src, from); err != nil || inside {
		if err == nil {
			err = syscall.EINVAL // as rename(2) does
		}
		return err
	}
	if root, err := isMountRoot(src, from); err != nil || root {
		if err == nil {
			err = syscall.EBUSY
		}
		return err
	}
	var st unix.Stat_t
	if !overwrite && unix.Fstatat(dst, to, &st, unix.AT_SYMLINK_NOFOLLOW) == nil {
		return syscall.EEXIST // an early answer before the work; the rename decides in the end
	}
	temp := tempName()
	err := copyAny(src, from, dst, temp, 0)
	if err == nil {
		err = syncAll(dst)
	}
	if err == nil {
		err = rename(dst, temp, dst, to, overwrite)
	}
	if err != nil {
		_ = removeAny(dst, temp) // best effort: the first error is returned
		return err
	}
	return removeAny(src, from)
}

// syncAll puts the copy on disk before its source is removed.
func syncAll(dir int) error {
	fd, err := open(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err == syscall.EACCES {
		unix.Sync() // the user may not read the folder
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Syncfs(fd)
}

// isInside reports whether the folder dir lies in the tree parent/name.
func isInside(dir, parent int, name string) (bool, error) {
	var tree, at, above unix.Stat_t
	if err := unix.Fstatat(parent, name, &tree, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return false, err
	}
	fd, err := open(dir, ".", unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return false, err
	}
	defer func() { unix.Close(fd) }()
	if err := unix.Fstat(fd, &at); err != nil {
		return false, err
	}
	for range maxPathLen {
		if at.Dev == tree.Dev && at.Ino == tree.Ino {
			return true, nil
		}
		up, err := open(fd, "..", unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return false, err
		}
		unix.Close(fd)
		fd = up
		if err := unix.Fstat(fd, &above); err != nil {
			return false, err
		}
		if above.Dev == at.Dev && above.Ino == at.Ino {
			return false, nil // the root is its own parent
		}
		at = above
	}
	return false, syscall.ELOOP
}

// copyAny copies one file, link, special file or folder to a name that must
// not exist, with mode, times and, where allowed, owner.
func copyAny(src int, from string, dst int, to string, depth int) error {
	var st unix.Stat_t
	if err := unix.Fstatat(src, from, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	var err error
	switch fileType(st.Mode) {
	case TypeFile:
		err = copyContent(src, from, dst, to)
	case TypeDirectory:
		err = copyFolder(src, from, dst, to, depth)
	case TypeSymlink:
		var target string
		if target, err = readlinkat(src, from); err == nil {
			err = unix.Symlinkat(target, dst, to)
		}
	default:
		err = unix.Mknodat(dst, to, st.Mode, int(st.Rdev))
	}
	if err != nil {
		return err
	}
	// Owner before mode: changing the owner clears setuid.
	err = unix.Fchownat(dst, to, int(st.Uid), int(st.Gid), unix.AT_SYMLINK_NOFOLLOW)
	mode := st.Mode & modeBits
	if err != nil {
		mode &^= unix.S_ISUID | unix.S_ISGID // a user's copy is the user's own
	}
	if fileType(st.Mode) != TypeSymlink {
		if err := unix.Fchmodat(dst, to, mode, 0); err != nil {
			return err
		}
	}
	times := []unix.Timespec{st.Atim, st.Mtim}
	return unix.UtimesNanoAt(dst, to, times, unix.AT_SYMLINK_NOFOLLOW)
}

func copyContent(src int, from string, dst int, to string) error {
	in, _, err := openRegular(src, from, unix.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer unix.Close(in)
	out, err := open(dst, to, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer unix.Close(out)
	for { // sendfile copies in the kernel: no buffer of ours
		n, err := unix.Sendfile(out, in, nil, 1<<20)
		if err == syscall.EINTR || err == syscall.EAGAIN {
			continue
		}
		if err != nil || n == 0 {
			return err
		}
	}
}

func copyFolder(src int, from string, dst int, to string, depth int) error {
	if depth == maxCopyDepth {
		return fail(ErrTooLarge, "copy", from, "folders are nested more than 256 deep")
	}
	if root, err := isMountRoot(src, from); err != nil || root {
		if err == nil {
			err = fail(ErrBusy, "copy", from, "something is mounted there")
		}
		return err
	}
	const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW
	in, err := open(src, from, flags, 0)
	if err != nil {
		return err
	}
	defer unix.Close(in)
	if err := unix.Mkdirat(dst, to, 0o700); err != nil {
		return err
	}
	out, err := open(dst, to, flags, 0)
	if err != nil {
		return err
	}
	defer unix.Close(out)
	var failure error
	err = eachName(in, func(name []byte) bool {
		n := string(name)
		failure = copyAny(in, n, out, n, depth+1)
		return failure == nil
	})
	if failure != nil {
		return failure
	}
	return err
}
