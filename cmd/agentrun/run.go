package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"agentrun.dev/cmd/internal/cli"
	"agentrun.dev/internal/client/local"
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/storage/image"
	"agentrun.dev/internal/vmm/cpu"
	"github.com/spf13/cobra"
)

// runOptions are the flags of agentrun run.
type runOptions struct {
	kernel   string
	memory   cli.ByteSize
	cpus     int
	disks    []string
	hostname string
	console  bool
	cmdline  string
	limits   engine.Limits
	policy   microvm.JailPolicy
	engine   pick.Kind
	rootOptions
	execOptions
	entrypoint optionalString
}

// shutdownGrace is the time that processes which the command has left behind
// have to end.
const shutdownGrace = 2 * time.Second

func newRunCommand() *cobra.Command {
	o := runOptions{memory: 256 << 20, cpus: 1}
	cmd := &cobra.Command{
		Use:   "run (--image IMAGE | --rootfs DIR) [flags] [-- COMMAND [ARG...]]",
		Short: "Boot a sandbox, run a command in it, and throw it away",
		Long: `Boot a sandbox from an image or from a folder, run a command in it and return its
exit code. It is a microVM where there is hardware KVM, and runs on gVisor elsewhere
(--engine). What the command writes goes to a layer in memory and is gone when the
command ends. Nothing has to be installed in the image or folder.

With --image the image's settings hold, as with docker run: COMMAND takes the place
of its command and follows its entrypoint (--entrypoint replaces that, with '' for
none), its environment is there with --env over it, and it runs as the image's user
in its working folder unless --user and --workdir say otherwise. An image that is
known here by this name is taken as it is; otherwise it is pulled first.

With --rootfs the folder is packed into a read-only image; COMMAND is needed.

The exit code is the command's own, 128+N if signal N ended it, 124 if
--timeout did, and 125 if the sandbox could not be run.`,
		Example: `  agentrun run --image python:3.12-slim -- python -c 'print(1+1)'
  agentrun run --rootfs ./busybox -- uname -a
  agentrun run --rootfs ./debian -it -- bash
  echo 'print(1+1)' | agentrun run --rootfs ./debian -i -- python3 -`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return runCommand(cmd.Context(), o, args, cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.SetInterspersed(false)
	o.rootOptions.flags(f)
	f.Var(&o.entrypoint, "entrypoint", "program that COMMAND is given to, in place of the image's; '' for none")
	f.StringVar(&o.kernel, "kernel", "", "uncompressed vmlinux to boot instead of AgentRun's own")
	f.Var(&o.memory, "memory", "RAM of the microVM, such as 512M or 2G")
	f.IntVar(&o.cpus, "cpus", o.cpus, fmt.Sprintf("processors of the microVM, 1 to %d", cpu.MaxVCPUs))
	f.StringArrayVar(&o.disks, "disk", nil, "file to attach as a disk, FILE or FILE:ro (repeatable; /dev/vdb, /dev/vdc, …)")
	cli.EngineFlag(f, &o.engine)
	limitFlags(f, &o.limits)
	cli.PolicyFlags(f, &o.policy)
	o.execOptions.flags(f)
	f.StringVar(&o.hostname, "hostname", "sandbox", "host name of the microVM")
	f.BoolVar(&o.console, "console", false, "print the microVM's console log to stderr at the end")
	f.StringVar(&o.cmdline, "append", "", "more words for the kernel command line")
	cmd.MarkFlagsOneRequired("image", "rootfs")
	o.exclusive(cmd, "entrypoint")
	return cmd
}

func runCommand(ctx context.Context, o runOptions, argv []string, stdin io.Reader, stdout, stderr io.Writer) (err error) {
	kind, _ := pick.Choose(o.engine)
	if kind == pick.GVisor && (len(o.disks) > 0 || o.kernel != "" || o.cmdline != "") {
		return errors.New("--disk, --kernel and --append are for microVMs: gVisor has neither disks nor a kernel of its own to boot (--engine microvm)")
	}
	spec, config, closeFiles, err := o.spec(ctx, kind, stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeFiles()) }()
	if argv, err = o.settings(config, argv); err != nil {
		return err
	}
	return withStore(o.policy, func(s *local.Store) error {
		sb, err := s.Boot(ctx, kind, spec)
		if err != nil {
			return err
		}
		return o.runIn(ctx, sb, argv, stdin, stdout, stderr)
	})
}

// runIn runs a command in a sandbox, and ends the sandbox.
func (o *runOptions) runIn(ctx context.Context, sb engine.Sandbox, argv []string, stdin io.Reader, stdout, stderr io.Writer) error {
	status, err := o.exec(ctx, sb.Agent(), argv, stdin, stdout, stderr)
	if o.console {
		console, consoleErr := sb.Console(context.WithoutCancel(ctx))
		_, writeErr := stderr.Write(console)
		err = errors.Join(err, consoleErr, writeErr)
	}
	if err != nil {
		if end := endOf(sb); end != nil {
			err = fmt.Errorf("%w (%w)", err, end)
		}
		return errors.Join(err, sb.Close())
	}
	if err := sb.Shutdown(ctx, shutdownGrace); err != nil {
		return err
	}
	return result(status)
}

// endTime is the time that a sandbox may take to end after the session with its
// agent has ended.
const endTime = 2 * time.Second

// endOf is the error of a sandbox that has ended, and nil if it has not.
func endOf(sb engine.Sandbox) error {
	select {
	case <-sb.Agent().Done():
	default:
		return nil
	}
	select {
	case <-sb.Done():
		return sb.Wait()
	case <-time.After(endTime):
		return nil
	}
}

// settings applies the image's settings unless flags override them, and returns
// the argv to run.
func (o *runOptions) settings(config image.Config, argv []string) ([]string, error) {
	if o.entrypoint.set {
		config.Cmd, config.Entrypoint = nil, nil
		if o.entrypoint.value != "" {
			config.Entrypoint = []string{o.entrypoint.value}
		}
	}
	if argv = config.Command(argv); len(argv) == 0 {
		return nil, errors.New("no command was given, and the image has none: write it behind --")
	}
	o.execOptions.apply(config)
	return argv, nil
}

// exitTimedOut is the exit code of timeout(1) after a timeout.
const exitTimedOut = 124

func result(s guestrpc.ExitStatus) error {
	switch {
	case s.TimedOut:
		return exitCode(exitTimedOut)
	case s.Code != 0:
		return exitCode(s.Code)
	}
	return nil
}

// spec opens the files of the flags.
func (o *runOptions) spec(ctx context.Context, kind pick.Kind, stderr io.Writer) (_ engine.Spec, config image.Config, _ func() error, err error) {
	var files []*os.File
	closeFiles := func() error {
		var errs []error
		for _, f := range files {
			errs = append(errs, f.Close())
		}
		return errors.Join(errs...)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, closeFiles())
		}
	}()
	open := func(path string, flag int) (*os.File, error) {
		f, err := os.OpenFile(path, flag, 0)
		if err == nil {
			files = append(files, f)
		}
		return f, err
	}
	spec := engine.Spec{Memory: uint64(o.memory), VCPUs: o.cpus, Hostname: o.hostname, Cmdline: o.cmdline, Limits: o.limits}
	if spec.Root, config, err = o.openRoot(ctx, kind, stderr); err != nil {
		return spec, config, nil, err
	}
	files = append(files, spec.Root)
	if o.kernel != "" {
		if spec.Kernel, err = open(o.kernel, os.O_RDONLY); err != nil {
			return spec, config, nil, fmt.Errorf("--kernel: %w", err)
		}
	}
	for _, d := range o.disks {
		path, readOnly := strings.CutSuffix(d, ":ro")
		flag := os.O_RDWR
		if readOnly {
			flag = os.O_RDONLY
		}
		f, err := open(path, flag)
		if err != nil {
			return spec, config, nil, fmt.Errorf("--disk: %w", err)
		}
		spec.Files = append(spec.Files, engine.FileDisk{File: f, ReadOnly: readOnly, ID: filepath.Base(path)})
	}
	return spec, config, closeFiles, nil
}
