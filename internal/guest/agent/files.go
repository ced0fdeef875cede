package agent

import (
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Files does file operations with the rights of one user. It holds no descriptors and
// is cheap to make, so each request can make one.
//
// Paths are absolute and resolved by the kernel, symbolic links and ".." included;
// the user's rights, not the path's spelling, decide what is allowed.
type Files struct {
	id       Identity
	accounts Accounts
}

// NewFiles resolves user as Accounts.Lookup does.
func NewFiles(accounts Accounts, user string) (*Files, error) {
	id, err := accounts.Lookup(user)
	if err != nil {
		return nil, err
	}
	return &Files{id: id, accounts: accounts}, nil
}

// Identity is the user whose rights the operations have.
func (f *Files) Identity() Identity { return f.id }

// FileType is the type of a file.
type FileType uint8

// The types of files.
const (
	TypeUnknown FileType = iota
	TypeFile
	TypeDirectory
	TypeSymlink
	TypeFIFO
	TypeSocket
	TypeCharDevice
	TypeBlockDevice
)

// Info describes a file.
type Info struct {
	Path    string
	Name    string // last element of Path
	Type    FileType
	Mode    uint32 // permission, setuid, setgid and sticky bits
	Size    int64
	UID     uint32
	GID     uint32
	Owner   string // "" when the uid has no name
	Group   string // "" when the gid has no name
	ModTime time.Time
	Target  string // of a symbolic link
}

const modeBits = 0o7777

func fileType(mode uint32) FileType {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return TypeFile
	case unix.S_IFDIR:
		return TypeDirectory
	case unix.S_IFLNK:
		return TypeSymlink
	case unix.S_IFIFO:
		return TypeFIFO
	case unix.S_IFSOCK:
		return TypeSocket
	case unix.S_IFCHR:
		return TypeCharDevice
	case unix.S_IFBLK:
		return TypeBlockDevice
	}
	return TypeUnknown
}

func makeInfo(path string, st *unix.Stat_t, names *nameCache) Info {
	i := Info{
		Path: path, Name: path[strings.LastIndexByte(path, '/')+1:],
		Type: fileType(st.Mode), Mode: st.Mode & modeBits, Size: st.Size,
		UID: st.Uid, GID: st.Gid, ModTime: time.Unix(st.Mtim.Unix()),
	}
	if i.Name == "" {
		i.Name = "/"
	}
	i.Owner, i.Group = names.names(st.Uid, st.Gid)
	return i
}

// Stat describes the file that path leads to.
func (f *Files) Stat(path string) (Info, error) { return f.stat(path, 0) }

// Lstat describes path itself, which may be a symbolic link.
func (f *Files) Lstat(path string) (Info, error) { return f.stat(path, unix.AT_SYMLINK_NOFOLLOW) }

func (f *Files) stat(path string, flags int) (Info, error) {
	path, err := checkPath("stat", path)
	if err != nil {
		return Info{}, err
	}
	var st unix.Stat_t
	target := ""
	err = f.id.do(func() error {
		if err := unix.Fstatat(unix.AT_FDCWD, path, &st, flags); err != nil {
			return err
		}
		if st.Mode&unix.S_IFMT == unix.S_IFLNK {
			target, _ = readlinkat(unix.AT_FDCWD, path) // may be gone again
		}
		return nil
	})
	if err != nil {
		return Info{}, failed("stat", path, err)
	}
	info := makeInfo(path, &st, &nameCache{accounts: f.accounts})
	info.Target = target
	return info, nil
}

// Mkdir makes a folder, with parents also those above it. With parents a folder
// that exists is no error. Mode 0 is 0755; it is exact, not subject to umask.
func (f *Files) Mkdir(path string, mode uint32, parents bool) error {
	path, err := checkPath("make folder", path)
	if err != nil {
		return err
	}
	if mode == 0 {
		mode = 0o755
	}
	err = f.id.do(func() error {
		if parents {
			return mkdirAll(path, mode&modeBits)
		}
		return mkdirExact(path, mode&modeBits)
	})
	return failed("make folder", path, err)
}

func mkdirExact(path string, mode uint32) error {
	if err := unix.Mkdir(path, mode); err != nil {
		return err
	}
	return unix.Chmod(path, mode)
}

// mkdirAll makes missing folders, from the top. Parents get 0755.
func mkdirAll(path string, mode uint32) error {
	for i := 1; i <= len(path); i++ {
		if i < len(path) && path[i] != '/' {
			continue
		}
		part, m := path[:i], mode
		if i < len(path) {
			m = 0o755
		}
		err := mkdirExact(part, m)
		if err == nil {
			continue
		}
		// mkdir may report a read-only filesystem or missing rights for a folder that
		// exists. That is no error, because only missing folders need to be made.
		var st unix.Stat_t
		if unix.Stat(part, &st) != nil {
			return failed("make folder", part, err)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return failed("make folder", part, syscall.ENOTDIR)
		}
	}
	return nil
}

// Symlink makes path a symbolic link to target.
func (f *Files) Symlink(target, path string) error {
	path, err := checkPath("link", path)
	if err != nil {
		return err
	}
	if target == "" || strings.IndexByte(target, 0) >= 0 {
		return fail(ErrInvalid, "link", path, "the target is empty or holds a zero byte")
	}
	return failed("link", path, f.id.do(func() error { return unix.Symlink(target, path) }))
}

// Readlink returns the target of a symbolic link.
func (f *Files) Readlink(path string) (target string, err error) {
	path, err = checkPath("read link", path)
	if err != nil {
		return "", err
	}
	err = f.id.do(func() error {
		target, err = readlinkat(unix.AT_FDCWD, path)
		return err
	})
	return target, failed("read link", path, err)
}

func readlinkat(dirfd int, path string) (string, error) {
	var buf [unix.PathMax]byte
	n, err := unix.Readlinkat(dirfd, path, buf[:])
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// Chmod sets the permission bits of the file that path leads to.
func (f *Files) Chmod(path string, mode uint32) error {
	path, err := checkPath("change mode of", path)
	if err != nil {
		return err
	}
	if mode&^modeBits != 0 {
		return fail(ErrInvalid, "change mode of", path, "mode has bits outside 07777")
	}
	return failed("change mode of", path, f.id.do(func() error { return unix.Chmod(path, mode) }))
}

// Chown sets the owner and group; "" leaves either unchanged. Names and numbers are
// allowed. Unless follow is set, a symbolic link itself is changed.
func (f *Files) Chown(path, owner, group string, follow bool) error {
	path, err := checkPath("change owner of", path)
	if err != nil {
		return err
	}
	uid, gid := -1, -1
	if owner != "" {
		id, err := f.accounts.lookupUser(owner)
		if err != nil {
			return err
		}
		uid = int(id.UID)
	}
	if group != "" {
		g, err := f.accounts.LookupGroup(group)
		if err != nil {
			return err
		}
		gid = int(g)
	}
	flags := unix.AT_SYMLINK_NOFOLLOW
	if follow {
		flags = 0
	}
	err = f.id.do(func() error { return unix.Fchownat(unix.AT_FDCWD, path, uid, gid, flags) })
	return failed("change owner of", path, err)
}

// checkPath requires an absolute path. It removes trailing slashes, which would make
// the kernel follow a symbolic link.
func checkPath(op, path string) (string, error) {
	switch {
	case path == "" || path[0] != '/':
		return "", fail(ErrInvalid, op, strconv.Quote(path), "the path must be absolute")
	case strings.IndexByte(path, 0) >= 0:
		return "", fail(ErrInvalid, op, strconv.Quote(path), "the path holds a zero byte")
	case len(path) >= maxPathLen:
		return "", fail(ErrTooLarge, op, path[:64]+"…", "the path is longer than 4095 bytes")
	}
	for len(path) > 1 && path[len(path)-1] == '/' {
		path = path[:len(path)-1]
	}
	return path, nil
}

// splitPath cuts off the last element, for operations on the name itself.
func splitPath(op, path string) (dir, name string, err error) {
	i := strings.LastIndexByte(path, '/')
	dir, name = path[:i], path[i+1:]
	if dir == "" {
		dir = "/"
	}
	if name == "" || name == "." || name == ".." {
		return "", "", fail(ErrInvalid, op, path, "the path must end in a name")
	}
	return dir, name, nil
}

func joinPath(dir, name string) string {
	if dir == "/" {
		return "/" + name
	}
	return dir + "/" + name
}
