package main

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
	"github.com/spf13/pflag"
)

// engineFlag is that of commands that begin with a root filesystem. What comes
// of it knows its engine.
func engineFlag(f *pflag.FlagSet, k *pick.Kind) {
	*k = pick.Auto
	f.Var(k, "engine", "microvm, gvisor, or auto: microVMs on hardware KVM, gVisor elsewhere")
}

// openRoot opens a root filesystem for a guest.
func openRoot(ctx context.Context, path string, kind pick.Kind, stderr io.Writer) (_ *os.File, err error) {
	path, cleanup, err := rootPath(ctx, path, kind, stderr)
	if err != nil {
		return nil, err
	}
	// An open file outlives its name.
	defer func() { err = errors.Join(err, cleanup()) }()
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("--rootfs: %w", err)
	}
	return f, nil
}

// rootPath is the path of an image: the given one, or that of an image made of
// the given folder, which cleanup removes. What an engine cannot carry is said.
func rootPath(ctx context.Context, path string, kind pick.Kind, stderr io.Writer) (_ string, cleanup func() error, err error) {
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
			err = sayLost(stderr, lost)
		}
	} else {
		err = image.FromDir(ctx, path, out)
	}
	if err != nil {
		return "", nil, errors.Join(err, cleanup())
	}
	return out, cleanup, nil
}

// sayLost names files whose extended attributes gVisor cannot carry.
func sayLost(stderr io.Writer, files []string) error {
	if len(files) == 0 {
		return nil
	}
	_, err := fmt.Fprintf(stderr, "agentrun: gVisor carries no extended attributes, and so no file capabilities: %d files lose theirs (%s)\n", len(files), some(files))
	return err
}

// some is the beginning of a list.
func some(list []string) string {
	const most = 5
	if len(list) > most {
		return strings.Join(list[:most], ", ") + ", …"
	}
	return strings.Join(list, ", ")
}
