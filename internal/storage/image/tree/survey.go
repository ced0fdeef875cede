package tree

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Survey collects the facts of a tree that was made in another way.
func Survey(dir string) (facts Facts, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		facts.Entries++
		info, err := d.Info()
		if err != nil {
			return err
		}
		if info.Mode().IsRegular() {
			facts.Bytes += info.Size()
		}
		found, err := xattrs(path, unix.Llistxattr)
		if errors.Is(err, unix.ENOTSUP) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read extended attributes of %s: %w", path, err)
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		facts.add(filepath.Join("/", name), found)
		return nil
	})
	return facts, err
}
