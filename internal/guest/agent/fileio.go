package agent

import (
	"io"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// openRegular opens a regular file and nothing else. Opening a FIFO, device or socket
// could block the agent or have side effects, so openRegular checks the type first.
// O_NONBLOCK covers the case that the file was exchanged meanwhile. Errors of the
// system call itself are returned bare.
func openRegular(dirfd int, name string, flags int, mode uint32) (fd int, st unix.Stat_t, err error) {
	if err := unix.Fstatat(dirfd, name, &st, 0); err == nil {
		if err := regular(&st); err != nil {
			return -1, st, err
		}
	} else if flags&unix.O_CREAT == 0 {
		return -1, st, err
	}
	fd, err = open(dirfd, name, flags|unix.O_NONBLOCK|unix.O_NOCTTY, mode)
	if err != nil {
		return -1, st, err
	}
	if err = unix.Fstat(fd, &st); err == nil {
		err = regular(&st)
	}
	if err != nil {
		unix.Close(fd)
		return -1, st, err
	}
	return fd, st, nil
}

func regular(st *unix.Stat_t) error {
	switch fileType(st.Mode) {
	case TypeFile:
		return nil
	case TypeDirectory:
		return syscall.EISDIR
	}
	return ErrNotRegular
}

// FileReader reads a part of a file. It is not for concurrent use.
type FileReader struct {
	info Info
	fd   int
	off  int64
	left int64 // bytes left; negative: to the end
}

// OpenRead opens a regular file from offset on. Length 0 reads to the end. Files of
// /proc and /sys are regular too, whatever size they report.
func (f *Files) OpenRead(path string, offset, length int64) (*FileReader, error) {
	path, err := checkPath("open", path)
	if err != nil {
		return nil, err
	}
	if offset < 0 || length < 0 {
		return nil, fail(ErrInvalid, "open", path, "offset or length is negative")
	}
	if length == 0 {
		length = -1
	}
	r := &FileReader{fd: -1, off: offset, left: length}
	var st unix.Stat_t
	err = f.id.do(func() (err error) {
		r.fd, st, err = openRegular(unix.AT_FDCWD, path, unix.O_RDONLY, 0)
		return err
	})
	if err != nil {
		return nil, openError(path, err)
	}
	r.info = makeInfo(path, &st, &nameCache{accounts: f.accounts})
	return r, nil
}

func openError(path string, err error) error {
	if err == ErrNotRegular {
		return fail(ErrNotRegular, "open", path, "a FIFO, socket or device cannot be read or written as a file")
	}
	return failed("open", path, err)
}

// Info describes the file as it was opened.
func (r *FileReader) Info() Info { return r.info }

// Read implements io.Reader.
func (r *FileReader) Read(p []byte) (int, error) {
	if r.fd < 0 {
		return 0, ErrClosed
	}
	if r.left >= 0 && int64(len(p)) > r.left {
		p = p[:r.left]
	}
	if r.left == 0 {
		return 0, io.EOF
	}
	for {
		n, err := unix.Pread(r.fd, p, r.off)
		switch {
		case err == syscall.EINTR:
			continue
		case err != nil:
			return 0, failed("read", r.info.Path, err)
		case n == 0 && len(p) > 0:
			return 0, io.EOF
		}
		r.off += int64(n)
		if r.left > 0 {
			r.left -= int64(n)
		}
		return n, nil
	}
}

// Close closes the file. Closing again does nothing.
func (r *FileReader) Close() error {
	if r.fd >= 0 {
		unix.Close(r.fd)
		r.fd = -1
	}
	return nil
}

// WriteMode says where the bytes are written.
type WriteMode uint8

// The modes of writing.
const (
	WriteTruncate WriteMode = iota // replace the content
	WriteAppend                    // at the end, even if others append, too
	WriteAt                        // over the content from WriteOptions.Offset on
)

// WriteOptions says how to write a file.
type WriteOptions struct {
	Mode      WriteMode
	Offset    int64  // with WriteAt
	Perm      uint32 // of a new file; 0 is 0644. Exact, not subject to umask
	NoCreate  bool   // fail if the file does not exist
	Exclusive bool   // fail if the file exists
	Parents   bool   // make missing folders above it
	Sync      bool   // fsync at Commit; Atomic always does

	// Atomic shows readers the old content or the new, never a mixture. The bytes go
	// to a temporary file in the same folder, which replaces the old one at Commit
	// and has its mode and owner. Only with WriteTruncate.
	Atomic bool
}

// FileWriter writes one file. The caller must call Commit or Abort; after one of them
// the other does nothing. It is not for concurrent use.
type FileWriter struct {
	files   *Files
	path    string
	fd      int
	off     int64 // negative: the kernel's own position
	sync    bool
	replace bool // false: an atomic write must not overwrite

	dir  int // atomic: the folder, else -1
	temp string
	name string
}

// OpenWrite opens a regular file for writing.
func (f *Files) OpenWrite(path string, opts WriteOptions) (*FileWriter, error) {
	path, err := checkPath("write", path)
	if err != nil {
		return nil, err
	}
	if opts.Offset < 0 || opts.Mode > WriteAt || opts.Perm&^modeBits != 0 || (opts.NoCreate && opts.Exclusive) ||
		(opts.Offset != 0 && opts.Mode != WriteAt) || (opts.Atomic && opts.Mode != WriteTruncate) {
		return nil, fail(ErrInvalid, "write", path, "the options contradict each other or are out of range")
	}
	if opts.Perm == 0 {
		opts.Perm = 0o644
	}
	dir, _, err := splitPath("write", path)
	if err != nil {
		return nil, err
	}
	w := &FileWriter{files: f, path: path, fd: -1, off: -1, sync: opts.Sync, replace: !opts.Exclusive, dir: -1}
	err = f.id.do(func() error {
		if opts.Parents {
			if err := mkdirAll(dir, 0o755); err != nil {
				return err
			}
		}
		if opts.Atomic {
			return w.openTemp(&opts)
		}
		return w.openInPlace(&opts)
	})
	if err != nil {
		w.release()
		return nil, openError(path, err)
	}
	return w, nil
}

func (w *FileWriter) openInPlace(opts *WriteOptions) error {
	flags := unix.O_WRONLY
	if opts.Mode == WriteAppend {
		flags |= unix.O_APPEND
	}
	if opts.Mode == WriteAt {
		w.off = opts.Offset
	}
	// Truncation comes after the check that it is a regular file.
	var st unix.Stat_t
	var err error
	created := false
	if !opts.Exclusive {
		w.fd, st, err = openRegular(unix.AT_FDCWD, w.path, flags, 0)
	}
	if opts.Exclusive || (err == syscall.ENOENT && !opts.NoCreate) {
		w.fd, st, err = openRegular(unix.AT_FDCWD, w.path, flags|unix.O_CREAT|unix.O_EXCL, opts.Perm)
		created = err == nil
		switch {
		case opts.Exclusive && (err == ErrNotRegular || err == syscall.EISDIR):
			err = syscall.EEXIST
		case !opts.Exclusive && err == syscall.EEXIST:
			// A dangling link is written through, as by any program.
			w.fd, st, err = openRegular(unix.AT_FDCWD, w.path, flags|unix.O_CREAT, opts.Perm)
		}
	}
	if err != nil {
		return err
	}
	if created {
		return unix.Fchmod(w.fd, opts.Perm)
	}
	if opts.Mode == WriteTruncate && st.Size > 0 {
		if err := unix.Ftruncate(w.fd, 0); err != nil {
			return err
		}
	}
	// The kernel clears setuid when a user writes, but here root writes.
	if special := st.Mode & (unix.S_ISUID | unix.S_ISGID); special != 0 && !w.files.id.root() {
		return w.dropSpecial(st.Mode)
	}
	return nil
}

// dropSpecial clears setuid and setgid. The caller runs with the rights of the user,
// who may not own the file, so another thread changes the mode as root.
func (w *FileWriter) dropSpecial(mode uint32) error {
	done := make(chan error, 1)
	go func() { done <- unix.Fchmod(w.fd, mode&modeBits&^(unix.S_ISUID|unix.S_ISGID)) }()
	return <-done
}

func (w *FileWriter) openTemp(opts *WriteOptions) error {
	path, err := throughLinks(w.path)
	if err != nil {
		return err
	}
	dir, name, err := splitPath("write", path)
	if err != nil {
		return err
	}
	w.name = name
	// O_PATH needs no right to read the folder; writing a file does not either.
	if w.dir, err = open(unix.AT_FDCWD, dir, unix.O_PATH|unix.O_DIRECTORY, 0); err != nil {
		return err
	}
	var old unix.Stat_t
	exists := unix.Fstatat(w.dir, name, &old, unix.AT_SYMLINK_NOFOLLOW) == nil
	switch {
	case exists && opts.Exclusive:
		return syscall.EEXIST
	case !exists && opts.NoCreate:
		return syscall.ENOENT
	case exists:
		if err := regular(&old); err != nil {
			return err
		}
		// A file that the user may not write must not be replaced either.
		if err := unix.Faccessat(w.dir, name, unix.W_OK, unix.AT_EACCESS); err != nil {
			return err
		}
	}
	if w.fd, w.temp, err = makeTemp(w.dir); err != nil {
		return err
	}
	perm := opts.Perm
	if exists {
		perm = old.Mode & modeBits
		// Only root can give a file away. If another user cannot keep the owner, the
		// new file loses setuid and setgid.
		if err := unix.Fchown(w.fd, int(old.Uid), int(old.Gid)); err != nil && w.files.id.root() {
			return err
		} else if err != nil {
			perm &^= unix.S_ISUID | unix.S_ISGID
		}
	}
	return unix.Fchmod(w.fd, perm)
}

// makeTemp makes a file in dir that is to take the place of another.
func makeTemp(dir int) (fd int, name string, err error) {
	for range 16 {
		name = tempName()
		fd, err = open(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600)
		if err != syscall.EEXIST {
			break
		}
	}
	if err != nil {
		return -1, "", err
	}
	return fd, name, nil
}

// tempName is hidden and unlikely to be taken; O_EXCL and trying again make it
// certain.
func tempName() string { return ".agentrun-" + strconv.FormatInt(time.Now().UnixNano(), 36) }

// throughLinks follows symbolic links in the last element only. The kernel resolves
// the other elements, and handles ".." after a link correctly.
func throughLinks(path string) (string, error) {
	for range 40 { // MAXSYMLINKS of the kernel
		target, err := readlinkat(unix.AT_FDCWD, path)
		if err == syscall.EINVAL || err == syscall.ENOENT {
			return path, nil
		}
		if err != nil {
			return "", err
		}
		if target == "" {
			return "", syscall.ENOENT
		}
		if target[0] != '/' {
			dir, _, err := splitPath("write", path)
			if err != nil {
				return "", err
			}
			target = joinPath(dir, target)
		}
		if path, err = checkPath("write", target); err != nil {
			return "", err
		}
	}
	return "", syscall.ELOOP
}

// Write implements io.Writer: all of p, or an error.
func (w *FileWriter) Write(p []byte) (int, error) {
	if w.fd < 0 {
		return 0, ErrClosed
	}
	done := 0
	for done < len(p) {
		var n int
		var err error
		if w.off >= 0 {
			n, err = unix.Pwrite(w.fd, p[done:], w.off)
		} else {
			n, err = unix.Write(w.fd, p[done:])
		}
		if n > 0 {
			done += n
			if w.off >= 0 {
				w.off += int64(n)
			}
		}
		if err != nil && err != syscall.EINTR {
			return done, failed("write", w.path, err)
		}
	}
	return done, nil
}

// Commit completes the write. If it returns no error after an atomic write, the new
// content is on disk and in place.
func (w *FileWriter) Commit() error {
	if w.fd < 0 {
		return nil
	}
	defer w.release()
	if w.sync || w.temp != "" {
		if err := fsync(w.fd); err != nil {
			return failed("write", w.path, err)
		}
	}
	if w.temp == "" {
		return nil
	}
	err := w.files.id.do(func() error { return rename(w.dir, w.temp, w.dir, w.name, w.replace) })
	if err != nil {
		return failed("write", w.path, err)
	}
	w.temp = ""
	return failed("write", w.path, syncFolder(w.dir))
}

// Abort gives up. An atomic write leaves no trace. Any other write leaves the bytes
// that were written.
func (w *FileWriter) Abort() { w.release() }

func (w *FileWriter) release() {
	if w.fd >= 0 {
		unix.Close(w.fd)
		w.fd = -1
	}
	if w.temp != "" {
		_ = unix.Unlinkat(w.dir, w.temp, 0) // best effort: nobody knows the name
		w.temp = ""
	}
	if w.dir >= 0 {
		unix.Close(w.dir)
		w.dir = -1
	}
}

func fsync(fd int) error {
	for {
		if err := unix.Fsync(fd); err != syscall.EINTR {
			return err
		}
	}
}

// syncFolder syncs the folder behind an O_PATH descriptor. It is done as root:
// the user may write to a folder without being allowed to read it.
func syncFolder(dir int) error {
	fd, err := open(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return fsync(fd)
}

// rename moves a name, over an existing one only if replace says so.
func rename(fromDir int, from string, toDir int, to string, replace bool) error {
	flags := uint(0)
	if !replace {
		flags = unix.RENAME_NOREPLACE
	}
	err := unix.Renameat2(fromDir, from, toDir, to, flags)
	if err != syscall.EINVAL || replace {
		return err
	}
	// Some filesystems support no flags. There the gap between the check and the
	// rename cannot be closed. If EINVAL had another reason, the second call returns
	// it again.
	var st unix.Stat_t
	if unix.Fstatat(toDir, to, &st, unix.AT_SYMLINK_NOFOLLOW) == nil {
		return syscall.EEXIST
	}
	return unix.Renameat(fromDir, from, toDir, to)
}
