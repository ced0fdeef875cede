// Package durable writes files that survive a power cut completely: it fills a file
// under another name, syncs it, gives it its name, and syncs the folder of the name.
// When a function returns nil, its effect is permanent. A process that is killed before
// that has changed nothing. Folders that are filled and then moved as one (snapshots,
// images) need the same steps, which are here, too.
//
// internal/archtest keeps other packages from syncing and renaming files
// themselves.
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
// leaves such files. The owner of a folder removes them when no process writes there.
const TempPrefix = ".new-"

// WriteFile makes or replaces a file.
func WriteFile(path string, b []byte, mode fs.FileMode) error {
	return Replace(path, mode, func(f *os.File) error {
		_, err := f.Write(b)
		return err
	})
}

// Replace makes a file that fill writes, and gives it its name. It replaces an old file
// of that name.
func Replace(path string, mode fs.FileMode, fill func(*os.File) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), TempPrefix) // readable only for this user until it is complete
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
	if _, err := os.Lstat(path); err == nil { // check this first, because filling the file may take long
		return &os.PathError{Op: "create", Path: path, Err: fs.ErrExist}
	}
	// A file without a name: a process that is killed while it fills the file
	// leaves no file behind.
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

// finish fills a file, and sets its mode and syncs it.
func finish(f *os.File, mode fs.FileMode, fill func(*os.File) error) error {
	if err := fill(f); err != nil {
		return err
	}
	if err := f.Chmod(mode); err != nil {
		return err
	}
	return f.Sync()
}

// ReplaceVolatile is WriteFile for data that is worthless after a restart of the host.
// A killed process leaves the old file or the new one, a power cut perhaps a damaged
// one. It does not wait for the disk.
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

// Rename moves a file or a folder whose content is durable. It may replace a file.
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

// Sync makes the content of an open file durable, even if it is open only for reading.
// It does not make its name durable: SyncFolder does that.
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

// WriteNew makes a read-only file in a folder that will be moved to its place later.
// The name of the file is durable once the folder is synced, before Place moves it.
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

// Place renames an entry of a folder to a name that must be free. The caller must sync
// the folder next.
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
