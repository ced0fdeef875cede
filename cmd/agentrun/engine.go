package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"agentrun.dev/internal/engine"
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
