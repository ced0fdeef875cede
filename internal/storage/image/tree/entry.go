package tree

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// folderEntry makes a folder, or changes the existing one.
func (t *Tree) folderEntry(l *layer, full string, hdr *tar.Header) error {
	if full != "" {
		if l.seen[full]&markFile != 0 {
			return refuse("the layer has another entry of this name")
		}
		info, err := t.root.Lstat(full)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err == nil && !info.IsDir() {
			if err := t.remove(full, false); err != nil {
				return err
			}
		}
		if err != nil || !info.IsDir() {
			if err := t.makeFolder(full); err != nil {
				return err
			}
		}
		l.seen[full] |= markDir
		l.touch(full)
	}
	f, err := t.root.OpenFile(orRoot(full), os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := t.setMetadata(f, full, hdr); err != nil {
		return err
	}
	return t.remember(full, hdr.ModTime)
}

// fileEntry replaces the existing entry by anything but a folder.
func (t *Tree) fileEntry(l *layer, full string, hdr *tar.Header, content io.Reader) error {
	if l.seen[full] != 0 {
		return refuse("the layer has another entry of this name, or entries below it")
	}
	link := ""
	if hdr.Typeflag == tar.TypeLink {
		var err error
		if link, err = t.linkTarget(hdr.Linkname); err != nil {
			return err
		}
		if link == full || strings.HasPrefix(link, full+"/") {
			return refuse("it is a link to itself, or to what it replaces")
		}
	}
	switch info, err := t.root.Lstat(full); {
	case err == nil:
		if err := t.remove(full, info.IsDir()); err != nil {
			return err
		}
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	l.seen[full] |= markFile
	l.touch(above(full))
	switch hdr.Typeflag {
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		return t.regular(l, full, hdr, content)
	case tar.TypeLink:
		return t.root.Link(link, full)
	case tar.TypeSymlink:
		return t.symlink(full, hdr)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		return t.device(full, hdr)
	}
	return refuse("entries of type %q are unknown", hdr.Typeflag)
}

// linkTarget resolves the target of a hard link. It must exist; the result is
// its path without links.
func (t *Tree) linkTarget(linkname string) (string, error) {
	name, err := t.cleanName(linkname)
	if err != nil {
		return "", fmt.Errorf("hard link to %q: %w", printable(linkname), err)
	}
	if name == "" {
		return "", refuse("a hard link to the root")
	}
	folder, err := t.folder(above(name), nil)
	if err != nil {
		return "", fmt.Errorf("hard link to %q: %w", printable(linkname), err)
	}
	full := path.Join(folder, path.Base(name))
	info, err := t.root.Lstat(full)
	if err != nil {
		return "", fmt.Errorf("hard link to %q: %w: %w", printable(linkname), ErrRefused, err)
	}
	if info.IsDir() {
		return "", refuse("a hard link to %q, which is a folder", printable(linkname))
	}
	return full, nil
}

func (t *Tree) regular(l *layer, full string, hdr *tar.Header, content io.Reader) (err error) {
	if hdr.Size < 0 || hdr.Size > t.limits.Bytes-t.bytes {
		return refuse("with its %d bytes the image is larger than %d", hdr.Size, t.limits.Bytes)
	}
	t.bytes += hdr.Size
	// O_EXCL: an existing entry, such as a device, is never opened.
	f, err := t.root.OpenFile(full, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := t.copySparse(l, f, content, hdr.Size); err != nil {
		return err
	}
	return t.setMetadata(f, full, hdr)
}

// zeros is a block of zeros, to find holes.
var zeros [32 << 10]byte

// copySparse writes a file, leaving out blocks of zeros.
func (t *Tree) copySparse(l *layer, f *os.File, content io.Reader, size int64) error {
	var at, written int64
	for at < size {
		n, err := io.ReadFull(content, t.buf[:min(int64(len(t.buf)), size-at)])
		for block := t.buf[:n]; len(block) > 0; {
			b := block[:min(len(block), len(zeros))]
			block = block[len(b):]
			if !bytes.Equal(b, zeros[:len(b)]) {
				if _, err := f.WriteAt(b, at); err != nil {
					return err
				}
				written = at + int64(len(b))
			}
			at += int64(len(b))
		}
		if err != nil {
			return fmt.Errorf("read its content: %w", err)
		}
		l.logical += int64(n)
		if err := l.guard.checkRatio(l.logical); err != nil {
			return err
		}
	}
	if written == size {
		return nil
	}
	return f.Truncate(size)
}

func (t *Tree) symlink(full string, hdr *tar.Header) error {
	if hdr.Linkname == "" || len(hdr.Linkname) > unix.PathMax-1 || strings.IndexByte(hdr.Linkname, 0) >= 0 {
		return refuse("a link to %q", printable(hdr.Linkname))
	}
	if err := t.root.Symlink(hdr.Linkname, full); err != nil {
		return err
	}
	return t.setMetadataAt(full, hdr, false)
}

func (t *Tree) device(full string, hdr *tar.Header) error {
	if t.devices++; t.devices > t.limits.Devices {
		return refuse("the image has more than %d devices", t.limits.Devices)
	}
	kind := map[byte]uint32{tar.TypeChar: unix.S_IFCHR, tar.TypeBlock: unix.S_IFBLK, tar.TypeFifo: unix.S_IFIFO}[hdr.Typeflag]
	var number uint64
	if hdr.Typeflag != tar.TypeFifo {
		// The widths of the numbers in Linux (include/linux/kdev_t.h).
		if hdr.Devmajor < 0 || hdr.Devmajor >= 1<<12 || hdr.Devminor < 0 || hdr.Devminor >= 1<<20 {
			return refuse("there is no device %d:%d", hdr.Devmajor, hdr.Devminor)
		}
		number = unix.Mkdev(uint32(hdr.Devmajor), uint32(hdr.Devminor))
	}
	parent, err := t.openParent(full)
	if err != nil {
		return err
	}
	if err := unix.Mknodat(int(parent.Fd()), path.Base(full), kind|0o600, int(number)); err != nil {
		return fmt.Errorf("make device: %w", err)
	}
	return t.setMetadataAt(full, hdr, true)
}

// setMetadata sets a file's or folder's metadata in this order: the owner,
// which clears set-id bits and capabilities, then these, then the time.
func (t *Tree) setMetadata(f *os.File, full string, hdr *tar.Header) error {
	uid, gid, err := owner(hdr)
	if err != nil {
		return err
	}
	if err := f.Chown(uid, gid); err != nil {
		return ownerError(err)
	}
	if err := unix.Fchmod(int(f.Fd()), permissions(hdr)); err != nil {
		return fmt.Errorf("set mode: %w", err)
	}
	if err := t.setXattrs(full, hdr, func(name string, value []byte) error {
		return unix.Fsetxattr(int(f.Fd()), name, value, 0)
	}); err != nil {
		return err
	}
	stamp, err := timespec(hdr.ModTime)
	if err != nil {
		return err
	}
	// An empty path means the file itself.
	return unix.UtimesNanoAt(int(f.Fd()), "", []unix.Timespec{stamp, stamp}, unix.AT_EMPTY_PATH)
}

// setMetadataAt does the same for an entry that must not be opened. Links have
// no mode.
func (t *Tree) setMetadataAt(full string, hdr *tar.Header, mode bool) error {
	uid, gid, err := owner(hdr)
	if err != nil {
		return err
	}
	parent, err := t.openParent(full)
	if err != nil {
		return err
	}
	fd, base := int(parent.Fd()), path.Base(full)
	if err := unix.Fchownat(fd, base, uid, gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return ownerError(err)
	}
	if mode { // it was just made, so it is not a link
		if err := unix.Fchmodat(fd, base, permissions(hdr), 0); err != nil {
			return fmt.Errorf("set mode: %w", err)
		}
	}
	if err := t.setXattrs(full, hdr, func(name string, value []byte) error {
		return unix.Lsetxattr(fmt.Sprintf("/proc/self/fd/%d/%s", fd, base), name, value, 0)
	}); err != nil {
		return err
	}
	stamp, err := timespec(hdr.ModTime)
	if err != nil {
		return err
	}
	return unix.UtimesNanoAt(fd, base, []unix.Timespec{stamp, stamp}, unix.AT_SYMLINK_NOFOLLOW)
}

func owner(hdr *tar.Header) (uid, gid int, err error) {
	for _, id := range []int{hdr.Uid, hdr.Gid} {
		if id < 0 || id >= math.MaxUint32 { // the last value means "unchanged"
			return 0, 0, refuse("there is no user or group %d", id)
		}
	}
	return hdr.Uid, hdr.Gid, nil
}

func ownerError(err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("set owner: %w: files of images have many owners, run this as root", err)
	}
	return fmt.Errorf("set owner: %w", err)
}

// permissions are the mode's bits that chmod(2) accepts, including set-id bits.
func permissions(hdr *tar.Header) uint32 { return uint32(hdr.Mode) & 0o7777 }

func timespec(m time.Time) (unix.Timespec, error) {
	if m.IsZero() { // the header has no time
		m = time.Unix(0, 0)
	}
	ts, err := unix.TimeToTimespec(m)
	if err != nil || m.Unix() < math.MinInt32 || m.Unix() > math.MaxUint32 {
		return ts, refuse("its time, %d seconds after 1970, is out of range", m.Unix())
	}
	return ts, nil
}

func (t *Tree) openParent(full string) (*os.File, error) {
	dir := orRoot(above(full))
	if t.parent != nil && t.parentPath == dir {
		return t.parent, nil
	}
	if err := t.closeParent(); err != nil {
		return nil, err
	}
	f, err := t.root.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	t.parent, t.parentPath = f, dir
	return f, nil
}

func (t *Tree) closeParent() error {
	if t.parent == nil {
		return nil
	}
	err := t.parent.Close()
	t.parent = nil
	return err
}

func orRoot(full string) string {
	if full == "" {
		return "."
	}
	return full
}
