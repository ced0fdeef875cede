package tree

import (
	"archive/tar"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// paxXattr is the prefix of a PAX record with an extended attribute.
	paxXattr = "SCHILY.xattr."
	// Capability is the extended attribute with a program's capabilities.
	Capability = "security.capability"
	// maxDropped bounds the list of dropped attributes.
	maxDropped = 32
)

// keptXattr reports whether an extended attribute has a meaning in a guest.
// Others belong to the host on which the image was made (SELinux labels,
// integrity hashes), or would change how a guest's overlay works
// (trusted.overlay).
func keptXattr(name string) bool {
	switch name {
	case Capability, "system.posix_acl_access", "system.posix_acl_default":
		return true
	}
	return strings.HasPrefix(name, "user.")
}

func (t *Tree) setXattrs(full string, hdr *tar.Header, set func(name string, value []byte) error) error {
	for record, value := range hdr.PAXRecords {
		name, ok := strings.CutPrefix(record, paxXattr)
		if !ok {
			continue
		}
		if !keptXattr(name) {
			if len(t.dropped) < maxDropped {
				t.dropped[printable(name)] = true
			}
			continue
		}
		if err := set(name, []byte(value)); err != nil {
			if errors.Is(err, unix.ENOTSUP) {
				return fmt.Errorf("set extended attribute %s: %w: the filesystem of the state folder has to support it", printable(name), err)
			}
			return fmt.Errorf("set extended attribute %s: %w", printable(name), err)
		}
		t.withXattrs[full] = true
	}
	return nil
}

// Facts holds properties of a tree that are not obvious from its files.
type Facts struct {
	// Bytes is the size of all unpacked files.
	Bytes   int64
	Entries int
	// WithXattrs are the files with extended attributes, by their path from the
	// root.
	WithXattrs []string
	// Capabilities are the files among WithXattrs that have capabilities.
	Capabilities []string
	// DroppedXattrs are names of extended attributes that were dropped.
	DroppedXattrs []string
}

func (f *Facts) add(path string, xattrs []string) {
	if len(xattrs) > 0 {
		f.WithXattrs = append(f.WithXattrs, path)
	}
	if slices.Contains(xattrs, Capability) {
		f.Capabilities = append(f.Capabilities, path)
	}
}

// Finish sets the metadata that could not be set while layers were applied.
func (t *Tree) Finish() (Facts, error) {
	facts := Facts{Bytes: t.bytes, Entries: t.entries}
	// A host may label every new file (SELinux), including the root.
	t.withXattrs[""] = true
	for full := range t.withXattrs {
		xattrs, err := t.listXattrs(full)
		if err != nil {
			return facts, fmt.Errorf("read extended attributes of %q: %w", printable(full), err)
		}
		facts.add("/"+full, xattrs)
	}
	slices.Sort(facts.WithXattrs)
	slices.Sort(facts.Capabilities)
	for name := range t.dropped {
		facts.DroppedXattrs = append(facts.DroppedXattrs, name)
	}
	slices.Sort(facts.DroppedXattrs)
	return facts, t.setTimes()
}

// listXattrs lists the attributes of a path; the list is empty if the path is
// gone.
func (t *Tree) listXattrs(full string) ([]string, error) {
	switch _, err := t.root.Lstat(orRoot(full)); {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		return nil, nil // a later layer has removed it
	case err != nil:
		return nil, err
	}
	path := "/proc/self/fd/"
	if full == "" {
		f, err := t.root.Open(".")
		if err != nil {
			return nil, err
		}
		defer f.Close()
		path += fmt.Sprint(f.Fd())
		return xattrs(path, unix.Listxattr)
	}
	parent, err := t.openParent(full)
	if err != nil {
		return nil, err
	}
	return xattrs(fmt.Sprintf("%s%d/%s", path, parent.Fd(), full[strings.LastIndexByte(full, '/')+1:]), unix.Llistxattr)
}

func xattrs(path string, list func(string, []byte) (int, error)) ([]string, error) {
	buf := make([]byte, 64<<10) // XATTR_LIST_MAX
	n, err := list(path, buf)
	if err != nil {
		return nil, err
	}
	var names []string
	for name := range strings.SplitSeq(strings.TrimRight(string(buf[:n]), "\x00"), "\x00") {
		if name != "" {
			names = append(names, name)
		}
	}
	return names, nil
}
