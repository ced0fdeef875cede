package tree

import (
	"errors"
	"io/fs"
	"path"
	"strings"
)

// OCI image specification, layer.md, "Whiteouts".
const (
	whiteoutPrefix = ".wh."
	whiteoutOpaque = ".wh..wh..opq"
)

// whiteout hides entries of lower layers.
func (t *Tree) whiteout(l *layer, name string) error {
	base := path.Base(name)
	folder, err := t.folder(above(name), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the entry does not exist
	}
	if err != nil {
		return err
	}
	if base == whiteoutOpaque {
		return t.hideBelow(l, folder)
	}
	target := strings.TrimPrefix(base, whiteoutPrefix)
	if target == "" || target == "." || target == ".." || strings.HasPrefix(target, whiteoutPrefix) {
		return refuse("it hides %q", target)
	}
	return t.hide(l, path.Join(folder, target))
}

// hide removes a path, except for entries of this layer.
func (t *Tree) hide(l *layer, full string) error {
	info, err := t.root.Lstat(full)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	switch {
	case l.seen[full] == 0:
		return t.remove(full, info.IsDir())
	case info.IsDir():
		return t.hideBelow(l, full)
	}
	return nil
}

func (t *Tree) hideBelow(l *layer, folder string) error {
	entries, err := fs.ReadDir(t.root.FS(), orRoot(folder))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := t.hide(l, path.Join(folder, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// remove removes a path and all entries below it.
func (t *Tree) remove(full string, isDir bool) error {
	if isDir {
		clear(t.dirs)
		if err := t.closeParent(); err != nil { // it may be the removed folder
			return err
		}
	}
	return t.root.RemoveAll(full)
}
