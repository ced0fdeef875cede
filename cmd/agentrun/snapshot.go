package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/cmd/internal/cli"
	"agentrun.dev/internal/client/local"
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/vmm/cpu"
	"github.com/spf13/cobra"
)

// withStore opens the user's snapshots and sandboxes for one command.
func withStore(policy microvm.JailPolicy, do func(*local.Store) error) (err error) {
	dir, err := local.DefaultFolder()
	if err != nil {
		return err
	}
	s, err := local.Open(dir, policy)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	return do(s)
}

// snapshotOptions are the flags of agentrun snapshot.
type snapshotOptions struct {
	kernel  string
	from    string
	memory  cli.ByteSize
	disk    cli.ByteSize
	scratch cli.ByteSize
	cpus    int
	limits  engine.Limits
	policy  microvm.JailPolicy
	engine  pick.Kind
	rootOptions
}

func newSnapshotCommand() *cobra.Command {
	o := snapshotOptions{memory: 256 << 20, cpus: 1}
	cmd := &cobra.Command{
		Use:   "snapshot NAME (--image IMAGE | --rootfs DIR | --from SANDBOX) [flags] [-- COMMAND [ARG...]]",
		Short: "Boot a sandbox, warm it up and freeze it; or freeze a running one",
		Long: `Freeze a machine under a name, memory, processes and disks included.

With --image or --rootfs a sandbox is booted from an image or from a folder. COMMAND,
if there is one, warms it up: it must end with success, and what it leaves running
runs in every fork. It runs as the image's user, in its working folder and with its
environment; the image's own entrypoint and command are not run.
With --from a sandbox made by agentrun fork is frozen; it goes on afterwards.

pack, unpack, push and pull take snapshots to other machines, in a file or through a
registry; they are no names for snapshots.`,
		Example: `  agentrun snapshot py --image python:3.12-slim -- python -c 'import json'
  agentrun snapshot base --rootfs ./debian -- sh -c 'server >/dev/null 2>&1 & wait-for-server'
  agentrun snapshot after-setup --from base-1`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.run(cmd.Context(), args[0], args[1:], cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	o.rootOptions.flags(f)
	f.StringVar(&o.from, "from", "", "running sandbox to freeze")
	f.StringVar(&o.kernel, "kernel", "", "uncompressed vmlinux to boot instead of AgentRun's own; forks then draw random numbers of their own only once VMGENID's interrupt or the agent has come")
	f.Var(&o.memory, "memory", "RAM of the microVM, such as 512M or 2G")
	f.Var(&o.disk, "disk", "size of what it may write over its root filesystem, at least 16M (default: half of the memory, and in it)")
	f.Var(&o.scratch, "scratch", "size of an empty disk, /dev/vdb, that forks get a copy of (default: none); on gVisor, by how much the root filesystem may grow (default: half of the memory)")
	f.IntVar(&o.cpus, "cpus", o.cpus, fmt.Sprintf("processors of the microVM, 1 to %d", cpu.MaxVCPUs))
	cli.EngineFlag(f, &o.engine)
	limitFlags(f, &o.limits)
	cli.PolicyFlags(f, &o.policy)
	cmd.MarkFlagsOneRequired("image", "rootfs", "from")
	o.exclusive(cmd)
	for _, flag := range append([]string{"rootfs", "kernel", "memory", "disk", "scratch", "cpus", "engine", "cpu-limit", "io-bytes", "io-ops"}, imageFlags...) {
		cmd.MarkFlagsMutuallyExclusive("from", flag)
	}
	cmd.AddCommand(newSnapshotPackCommand(), newSnapshotUnpackCommand(), newSnapshotPushCommand(), newSnapshotPullCommand())
	return cmd
}

func (o *snapshotOptions) run(ctx context.Context, text string, argv []string, stdout, stderr io.Writer) error {
	name, err := local.ParseName(text)
	if err != nil {
		return err
	}
	return withStore(o.policy, func(s *local.Store) error {
		if o.from == "" {
			err = o.template(ctx, s, name, argv, stdout, stderr)
		} else {
			err = o.capture(ctx, s, name, argv)
		}
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(stdout, name)
		return err
	})
}

func (o *snapshotOptions) capture(ctx context.Context, s *local.Store, name local.Name, argv []string) error {
	if len(argv) > 0 {
		return errors.New("--from takes no command: run it with agentrun exec before")
	}
	from, err := local.ParseName(o.from)
	if err != nil {
		return err
	}
	return s.Capture(ctx, from, name)
}

func (o *snapshotOptions) template(ctx context.Context, s *local.Store, name local.Name, argv []string, stdout, stderr io.Writer) error {
	kind, _ := pick.Choose(o.engine)
	root, config, err := o.openRoot(ctx, kind, stderr)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }() // only read
	spec := engine.Spec{Root: root, Memory: uint64(o.memory), VCPUs: o.cpus, Disk: uint64(o.disk), Scratch: uint64(o.scratch), Hostname: string(name), Limits: o.limits}
	if o.kernel != "" {
		if kind == pick.GVisor {
			return errors.New("--kernel is for microVMs: gVisor is a kernel of its own (--engine microvm)")
		}
		if spec.Kernel, err = os.Open(o.kernel); err != nil {
			return fmt.Errorf("--kernel: %w", err)
		}
		defer func() { _ = spec.Kernel.Close() }() // only read
	}
	return s.Template(ctx, name, kind, spec, func(sb engine.Sandbox) error {
		if len(argv) == 0 {
			return nil
		}
		st, err := sb.Agent().Run(ctx, guestrpc.ExecRequest{Argv: argv, Env: config.Env, Workdir: config.WorkingDir, User: config.User}, nil, stdout, stderr)
		if err != nil {
			return err
		}
		if st.Code != 0 {
			return fmt.Errorf("the warm-up command ended with exit code %d: nothing was frozen", st.Code)
		}
		return nil
	})
}
