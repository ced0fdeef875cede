// Package tree makes a root filesystem from an image's layers, in a folder.
//
// A layer is a tar archive, compressed with gzip or zstd or not at all. Its
// author is not trusted: every path goes through an os.Root, only files that
// were just made are opened, and the size of the expanded layer is bounded
// before it is written. If an archive breaks a rule, it is refused with an
// EntryError that names the entry; the caller must then discard the folder.
//
// The layers are applied as the OCI image specification says (layer.md):
// whiteouts hide entries of lower layers, never those of their own layer.
package tree

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Limits bound the size of expanded layers.
type Limits struct {
	// Bytes is the size of all files, sparse ones included, and Entries the
	// number of archive entries, of all layers together.
	Bytes   int64
	Entries int
	// Devices is how many of the entries may be devices and FIFOs.
	Devices int
	// Ratio is how many times as large as its compressed form a layer may be,
	// once it is larger than RatioFloor.
	Ratio      int64
	RatioFloor int64
	// AbsoluteNames accepts entries with names that start with /, and absolute
	// links to folders through which a layer writes. Both are taken relative to
	// the image's root. Otherwise they are refused.
	AbsoluteNames bool
}

// DefaultLimits are far above what images need.
func DefaultLimits() Limits {
	return Limits{Bytes: 64 << 30, Entries: 4 << 20, Devices: 4096, Ratio: 300, RatioFloor: 256 << 20}
}

// EntryError says which entry of a layer was refused, and why.
type EntryError struct {
	Name string
	Err  error
}

func (e *EntryError) Error() string { return fmt.Sprintf("entry %q: %v", printable(e.Name), e.Err) }
func (e *EntryError) Unwrap() error { return e.Err }

// printable shortens a hostile name.
func printable(name string) string {
	const most = 256
	if len(name) <= most {
		return name
	}
	cut := name[:most]
	for len(cut) > 0 && !utf8.ValidString(cut[len(cut)-1:]) && !utf8.RuneStart(cut[len(cut)-1]) {
		cut = cut[:len(cut)-1]
	}
	return cut + "…"
}

// ErrRefused is wrapped by every error that the archive causes.
var ErrRefused = errors.New("refused")

func refuse(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrRefused, fmt.Sprintf(format, args...))
}

// Tree is a root filesystem that is being made. Only one goroutine may use it.
type Tree struct {
	root   *os.Root
	limits Limits

	bytes   int64
	entries int
	devices int

	// dirs are paths that are known to be folders, without symbolic links in
	// the path.
	dirs map[string]bool
	// times are the modification times of folders. They are set at the end,
	// because every new entry changes the time of its folder.
	times map[string]folderTime
	// withXattrs are paths on which extended attributes were set.
	withXattrs map[string]bool
	dropped    map[string]bool
	// parent is the folder of the last entry for which one was opened.
	parent     *os.File
	parentPath string

	buf []byte
}

type folderTime struct {
	mtime time.Time
	inode uint64 // to notice that another folder has taken the path since
}

// New starts a tree in an empty folder.
func New(dir string, limits Limits) (*Tree, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("unpack image: %w", err)
	}
	t := &Tree{
		root: root, limits: limits,
		dirs: map[string]bool{}, times: map[string]folderTime{},
		withXattrs: map[string]bool{}, dropped: map[string]bool{},
		buf: make([]byte, 256<<10),
	}
	// The root's metadata if no layer sets it, independent of umask and time.
	if err := errors.Join(root.Chmod(".", 0o755), t.remember("", time.Unix(0, 0))); err != nil {
		return nil, errors.Join(fmt.Errorf("unpack image: %w", err), root.Close())
	}
	return t, nil
}

// Close frees the tree; the folder stays.
func (t *Tree) Close() error { return errors.Join(t.closeParent(), t.root.Close()) }

// layer is the state for one layer while it is applied.
type layer struct {
	// seen has the layer's own paths, and the folders above them.
	seen  map[string]mark
	guard *guard
	// logical is the size of the layer's files, holes included.
	logical int64
}

type mark uint8

const (
	markBelow mark = 1 << iota // an entry below it belongs to this layer
	markFile                   // it is an entry, and not a folder
	markDir                    // it is an entry, and a folder
)

// Apply applies a layer on top of the earlier ones. It reads r to its end. It
// returns the SHA-256 of the uncompressed archive: the layer's DiffID.
func (t *Tree) Apply(ctx context.Context, r io.Reader) (diffID [sha256.Size]byte, err error) {
	g, err := newGuard(ctx, r, t.limits)
	if err != nil {
		return diffID, err
	}
	defer g.Close()
	l := &layer{seen: map[string]mark{}, guard: g}
	archive := tar.NewReader(g)
	last := ""
	for {
		hdr, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			if last == "" {
				return diffID, fmt.Errorf("read archive: %w", err)
			}
			return diffID, fmt.Errorf("read archive after entry %q: %w", printable(last), err)
		}
		last = hdr.Name
		if err := t.apply(l, hdr, archive); err != nil {
			return diffID, &EntryError{Name: hdr.Name, Err: err}
		}
	}
	// The bytes after the archive's end are part of the layer's digest.
	if _, err := io.CopyBuffer(io.Discard, struct{ io.Reader }{g}, t.buf); err != nil {
		return diffID, fmt.Errorf("read archive: %w", err)
	}
	return g.sum(), nil
}

func (t *Tree) apply(l *layer, hdr *tar.Header, content io.Reader) error {
	if hdr.Typeflag == tar.TypeXGlobalHeader {
		return nil // of git archive: it holds only a comment
	}
	if t.entries++; t.entries > t.limits.Entries {
		return refuse("the image has more than %d entries", t.limits.Entries)
	}
	name, err := t.cleanName(hdr.Name)
	if err != nil {
		return err
	}
	base := path.Base(name)
	if strings.HasPrefix(name, whiteoutPrefix) && base != name || strings.Contains(above(name), "/"+whiteoutPrefix) {
		return refuse("folders cannot be named as whiteouts are")
	}
	if strings.HasPrefix(base, whiteoutPrefix) {
		return t.whiteout(l, name)
	}
	if name == "" {
		if hdr.Typeflag != tar.TypeDir {
			return refuse("the root is a folder")
		}
		return t.folderEntry(l, "", hdr)
	}
	folder, err := t.folder(above(name), l)
	if err != nil {
		return err
	}
	full := path.Join(folder, base)
	if len(full) > maxPath {
		return refuse("a path longer than %d bytes", maxPath)
	}
	if hdr.Typeflag == tar.TypeDir {
		return t.folderEntry(l, full, hdr)
	}
	return t.fileEntry(l, full, hdr, content)
}

// above is the parent folder of a path; for entries of the root it is "".
func above(full string) string {
	if dir := path.Dir(full); dir != "." {
		return dir
	}
	return ""
}

// maxPath keeps paths below PATH_MAX when the tree is packed: the folder has a
// path of its own.
const maxPath = 3500

// cleanName checks an entry's name; "" is the root.
func (t *Tree) cleanName(name string) (string, error) {
	if name == "" {
		return "", refuse("it has no name")
	}
	if strings.IndexByte(name, 0) >= 0 {
		return "", refuse("the name holds a zero byte")
	}
	if strings.HasPrefix(name, "/") && !t.limits.AbsoluteNames {
		return "", refuse("the name is absolute (if the image is trusted, absolute names can be allowed)")
	}
	if slices.Contains(strings.Split(name, "/"), "..") {
		return "", refuse("the name has .. in it")
	}
	clean := strings.TrimPrefix(path.Clean("/"+name), "/")
	if len(clean) > maxPath {
		return "", refuse("a path longer than %d bytes", maxPath)
	}
	return clean, nil
}

// maxLinks is Linux's MAXSYMLINKS.
const maxLinks = 40

// folder resolves a clean name to a folder, following links that stay inside,
// and returns its path without links. If l is given, it makes missing folders;
// otherwise a missing folder is fs.ErrNotExist.
func (t *Tree) folder(name string, l *layer) (string, error) {
	if name == "" || t.dirs[name] {
		return name, nil
	}
	at, links := "", 0
	todo := strings.Split(name, "/")
	for len(todo) > 0 {
		part := todo[0]
		todo = todo[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			if at == "" {
				return "", refuse("a link on its way leads out of the root")
			}
			at = above(at)
			continue
		}
		next := path.Join(at, part)
		if t.dirs[next] {
			at = next
			continue
		}
		if len(next) > maxPath {
			return "", refuse("a path longer than %d bytes", maxPath)
		}
		info, err := t.root.Lstat(next)
		switch {
		case errors.Is(err, fs.ErrNotExist) && l != nil:
			if err := t.makeFolder(next); err != nil {
				return "", err
			}
			l.touch(next)
		case err != nil:
			return "", err
		case info.IsDir():
			t.dirs[next] = true
		case info.Mode().Type() == fs.ModeSymlink:
			if links++; links > maxLinks {
				return "", refuse("more than %d links on its way", maxLinks)
			}
			target, err := t.root.Readlink(next)
			if err != nil {
				return "", err
			}
			if path.IsAbs(target) {
				if !t.limits.AbsoluteNames {
					return "", refuse("a link on its way, %q, is absolute (if the image is trusted, absolute names can be allowed)", printable(next))
				}
				at = ""
			}
			todo = append(strings.Split(target, "/"), todo...)
			continue
		default:
			return "", refuse("%q on its way is no folder", printable(next))
		}
		at = next
	}
	return at, nil
}

// makeFolder makes a folder for which the layer has no entry.
func (t *Tree) makeFolder(full string) error {
	if err := t.root.Mkdir(full, 0o755); err != nil {
		return err
	}
	if err := t.root.Chmod(full, 0o755); err != nil { // independent of the umask
		return err
	}
	t.dirs[full] = true
	return t.remember(full, time.Unix(0, 0))
}

// touch marks the folders above a path as this layer's. It also marks the path
// itself, if it is a folder that the layer implies.
func (l *layer) touch(full string) {
	for p := full; p != ""; p = above(p) {
		if l.seen[p]&markBelow != 0 {
			return
		}
		l.seen[p] |= markBelow
	}
}
