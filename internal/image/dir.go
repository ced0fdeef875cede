// Package image turns root filesystems into the form that guests boot from: a
// read-only, uncompressed EROFS file that any number of guests share.
package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// FromDir packs a folder into an EROFS image at out, which appears whole or
// not at all. The image has no inline data and no compression, so that every
// engine can read it and pages map straight onto the file.
func FromDir(ctx context.Context, dir, out string) (err error) {
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
	cmd := exec.CommandContext(ctx, mkfs, "-E", "noinline_data", "--preserve-mtime", "--quiet", tmp.Name(), dir)
	cmd.Stderr = &said
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("pack root filesystem %s with mkfs.erofs: %w: %s", dir, err, strings.TrimSpace(said.String()))
	}
	if err := os.Rename(tmp.Name(), out); err != nil {
		return fmt.Errorf("pack root filesystem: %w", err)
	}
	return nil
}
