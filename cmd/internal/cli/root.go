package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/storage/image"
)

// OpenRoot opens the EROFS file of --rootfs: the given file, or one without a name
// that is made of the given folder. It warns of files that lose attributes on the
// engine.
func OpenRoot(ctx context.Context, path string, kind pick.Kind, stderr io.Writer) (*os.File, error) {
	if folder, err := isFolder(path); err != nil {
		return nil, err
	} else if folder {
		f, lost, err := image.Unnamed(ctx, path, kind == pick.GVisor)
		if err != nil {
			return nil, err
		}
		if err := WarnLost(stderr, lost); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		return f, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("--rootfs: %w", err)
	}
	return f, nil
}

// isFolder reports whether --rootfs is a folder.
func isFolder(path string) (bool, error) {
	info, err := os.Stat(path)
	if err != nil {
		return false, fmt.Errorf("--rootfs: %w", err)
	}
	return info.IsDir(), nil
}

// RootPath is OpenRoot for callers that need a path, which other processes may open.
// cleanup removes the file if it was made.
func RootPath(ctx context.Context, path string, kind pick.Kind, stderr io.Writer) (_ string, cleanup func() error, err error) {
	if folder, err := isFolder(path); err != nil || !folder {
		return path, func() error { return nil }, err
	}
	dir, err := os.MkdirTemp("", "agentrun-root-")
	if err != nil {
		return "", nil, fmt.Errorf("--rootfs: %w", err)
	}
	cleanup = func() error { return os.RemoveAll(dir) }
	out := filepath.Join(dir, "root.erofs")
	if kind == pick.GVisor {
		var lost []string
		if lost, err = image.FromDirPlain(ctx, path, out); err == nil {
			err = WarnLost(stderr, lost)
		}
	} else {
		err = image.FromDir(ctx, path, out)
	}
	if err != nil {
		return "", nil, errors.Join(err, cleanup())
	}
	return out, cleanup, nil
}

// WarnLost names files whose extended attributes gVisor cannot carry.
func WarnLost(stderr io.Writer, files []string) error {
	if len(files) == 0 {
		return nil
	}
	_, err := fmt.Fprintf(stderr, "agentrun: gVisor carries no extended attributes, and so no file capabilities: %d files lose theirs (%s)\n", len(files), beginning(files))
	return err
}

// beginning is the first few of a list.
func beginning(list []string) string {
	const most = 5
	if len(list) > most {
		return strings.Join(list[:most], ", ") + ", …"
	}
	return strings.Join(list, ", ")
}
