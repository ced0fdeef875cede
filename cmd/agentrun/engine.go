package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/cmd/internal/cli"
	"agentrun.dev/internal/engine/pick"
)

// openRoot opens a root filesystem for a guest.
func openRoot(ctx context.Context, path string, kind pick.Kind, stderr io.Writer) (_ *os.File, err error) {
	path, cleanup, err := cli.RootPath(ctx, path, kind, stderr)
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
