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

// RootPath returns the path of an EROFS file for --rootfs: the given path, or a file
// made of the given folder, which cleanup removes. It warns of files that lose
// something on the engine.
func RootPath(ctx context.Context, path string, kind pick.Kind, stderr io.Writer) (_ string, cleanup func() error, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return "", nil, fmt.Errorf("--rootfs: %w", err)
	}
	if !info.IsDir() {
		return path, func() error { return nil }, nil
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
