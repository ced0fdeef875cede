package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/cmd/internal/cli"
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/pick"
)

// runOnGVisor is agentrun run on gVisor.
func (o *runOptions) runOnGVisor(ctx context.Context, argv []string, stdin io.Reader, stdout, stderr io.Writer) (err error) {
	if len(o.disks) > 0 || o.kernel != "" || o.cmdline != "" {
		return errors.New("--disk, --kernel and --append are for microVMs: gVisor has neither disks nor a kernel of its own to boot (--engine microvm)")
	}
	dir, err := os.MkdirTemp("/dev/shm", "agentrun-run-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	e, err := pick.Open(pick.GVisor, pick.Config{Resident: dir, Jail: o.policy})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	root, config, err := o.openRoot(ctx, pick.GVisor, stderr)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }() // only read
	if argv, err = o.settings(config, argv); err != nil {
		return err
	}
	sb, err := e.Boot(ctx, engine.Spec{Root: root, Memory: uint64(o.memory), VCPUs: o.cpus, Hostname: o.hostname, Limits: o.limits})
	if err != nil {
		return err
	}
	status, err := o.exec(ctx, sb.Agent(), argv, stdin, stdout, stderr)
	if o.console {
		console, consoleErr := sb.Console(context.WithoutCancel(ctx))
		_, writeErr := stderr.Write(console)
		err = errors.Join(err, consoleErr, writeErr)
	}
	if err != nil {
		select {
		case <-sb.Done():
			err = fmt.Errorf("%w (%w)", err, sb.Wait())
		default:
		}
		return errors.Join(err, sb.Close())
	}
	if err := sb.Shutdown(ctx, shutdownGrace); err != nil {
		return err
	}
	return result(status)
}

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
