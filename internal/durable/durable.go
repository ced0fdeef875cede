// Package durable writes files that survive a power cut whole: a file is filled under
// another name, synced, given its name, and the folder that has the name is synced. When
// a function returns nil, its effect stays; whoever is cut off before that has changed
// nothing. Folders that are filled and then moved as one (snapshots, images) are made of
// the same steps, which are here too.
//
// internal/archtest keeps others from syncing and renaming files themselves.
package durable

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// TempPrefix begins the names of files that are being written. A process that is killed
// leaves them; the owner of a folder removes them when nobody writes there.
const TempPrefix = ".new-"

// WriteFile makes or replaces a file.
func WriteFile(path string, b []byte, mode fs.FileMode) error {
	return Replace(path, mode, func(f *os.File) error {
		_, err := f.Write(b)
		return err
	})
}

// Replace has fill write a file, and gives it its name, which another one may have had.
func Replace(path string, mode fs.FileMode, fill func(*os.File) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), TempPrefix) // for this user alone, until it is whole
	if err != nil {
		return err
	}
	if err = errors.Join(finish(f, mode, fill), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return SyncFolder(filepath.Dir(path))
}

// Create is Replace for a name that must be free: the error is fs.ErrExist if it is not.
func Create(path string, mode fs.FileMode, fill func(*os.File) error) (err error) {
	if _, err := os.Lstat(path); err == nil { // filling it may take long
		return &os.PathError{Op: "create", Path: path, Err: fs.ErrExist}
	}
	// A file without a name: who is killed while it is filled leaves nothing.
	f, err := os.OpenFile(filepath.Dir(path), unix.O_TMPFILE|os.O_RDWR, 0o600)
	temp := ""
	if errors.Is(err, unix.EOPNOTSUPP) { // overlay filesystems before Linux 6.2
		if f, err = os.CreateTemp(filepath.Dir(path), TempPrefix); err == nil {
			temp = f.Name()
		}
	}
	if err != nil {
		return err
	}
	defer func() {
		if temp != "" {
			err = errors.Join(err, os.Remove(temp))
		}
		err = errors.Join(err, f.Close())
	}()
	if err := finish(f, mode, fill); err != nil {
		return err
	}
	from := "/proc/self/fd/" + strconv.Itoa(int(f.Fd()))
	if err := unix.Linkat(unix.AT_FDCWD, from, unix.AT_FDCWD, path, unix.AT_SYMLINK_FOLLOW); err != nil {
		return &os.LinkError{Op: "link", Old: from, New: path, Err: err}
	}
	return SyncFolder(filepath.Dir(path))
}

// finish fills a file for good.
func finish(f *os.File, mode fs.FileMode, fill func(*os.File) error) error {
	if err := fill(f); err != nil {
		return err
	}
	if err := f.Chmod(mode); err != nil {
		return err
	}
	return f.Sync()
}

// ReplaceVolatile is WriteFile for what a restart of the host makes worthless anyway: a
// killed process leaves the old file or the new one, a power cut perhaps a damaged one.
// It costs no wait for the disk.
func ReplaceVolatile(path string, b []byte, mode fs.FileMode) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), TempPrefix)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// Rename moves a file or a folder whose content is durable, and may replace a file.
func Rename(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	if err := SyncFolder(filepath.Dir(to)); err != nil {
		return err
	}
	if filepath.Dir(from) == filepath.Dir(to) {
		return nil
	}
	return SyncFolder(filepath.Dir(from))
}

// Sync makes the content of an open file durable, which whoever has it open for reading
// can do too. Its name is not: SyncFolder does that.
func Sync(f *os.File) error { return f.Sync() }

// SyncFolder makes the names in a folder durable.
func SyncFolder(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// SyncRoot is SyncFolder for an open folder.
func SyncRoot(root *os.Root) error {
	dir, err := root.Open(".")
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// WriteNew makes a read-only file in a folder that is not in its place yet. Its name is
// durable when the folder is synced, before it is moved with Place.
func WriteNew(root *os.Root, name string, b []byte) error {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o400)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// Place gives an entry of a folder another name, which must be free. The folder is to be
// synced next.
func Place(root *os.Root, from, to string) error {
	dir, err := root.Open(".")
	if err != nil {
		return err
	}
	defer dir.Close()
	fd := int(dir.Fd())
	if err := unix.Renameat2(fd, from, fd, to, unix.RENAME_NOREPLACE); err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	return nil
}
