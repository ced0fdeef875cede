// Package image turns root filesystems into the form that guests boot from: a
// read-only, uncompressed EROFS file that any number of guests share.
package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// FromDir packs a folder into an EROFS image at out, which appears whole or
// not at all. The image has no inline data and no compression, so that every
// engine can read it and pages map straight onto the file.
func FromDir(ctx context.Context, dir, out string) error { return fromDir(ctx, dir, out) }

// FromDirPlain is FromDir without extended attributes, which gVisor cannot read:
// a file that has any could not be opened. lost names the files that had some,
// such as the capabilities of programs, from the folder on.
func FromDirPlain(ctx context.Context, dir, out string) (lost []string, err error) {
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return nil, fmt.Errorf("root filesystem: %w", err)
	}
	err = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		n, err := unix.Llistxattr(path, nil)
		if err != nil && !errors.Is(err, unix.ENOTSUP) {
			return fmt.Errorf("list the extended attributes of %s: %w", path, err)
		}
		if n > 0 {
			name, err := filepath.Rel(dir, path)
			if err != nil {
				return err
			}
			lost = append(lost, name)
		}
		return ctx.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("root filesystem: %w", err)
	}
	return lost, fromDir(ctx, dir, out, "-x-1")
}

func fromDir(ctx context.Context, dir, out string, more ...string) (err error) {
	// mkfs.erofs would pack a link to the folder as what it is.
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return fmt.Errorf("root filesystem: %w", err)
	}
	info, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("root filesystem: %w", err)
	}
	if !info.IsDir() {
		return fmt.Errorf("root filesystem %s is not a folder", dir)
	}
	mkfs, err := exec.LookPath("mkfs.erofs")
	if err != nil {
		return errors.New("mkfs.erofs is missing: apt-get install erofs-utils")
	}
	tmp, err := os.CreateTemp(filepath.Dir(out), ".erofs-*")
	if err != nil {
		return fmt.Errorf("pack root filesystem: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(tmp.Name()))
		}
	}()
	if err := tmp.Close(); err != nil {
		return fmt.Errorf("pack root filesystem: %w", err)
	}
	var said strings.Builder
	args := append([]string{"-E", "noinline_data", "--preserve-mtime", "--quiet"}, more...)
	cmd := exec.CommandContext(ctx, mkfs, append(args, tmp.Name(), dir)...)
	cmd.Stderr = &said
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("pack root filesystem %s with mkfs.erofs: %w: %s", dir, err, strings.TrimSpace(said.String()))
	}
	if err := os.Rename(tmp.Name(), out); err != nil {
		return fmt.Errorf("pack root filesystem: %w", err)
	}
	return nil
}
