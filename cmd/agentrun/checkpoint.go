package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/sandbox"
	"github.com/spf13/cobra"
)

func newCheckpointCommand() *cobra.Command {
	var o daemonOptions
	var name string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "checkpoint SANDBOX [--name NAME]",
		Short: "Write a sandbox to disk under a name, to go back to it as often as you like",
		Long: `Write a sandbox of the daemon to disk, as it is at this instant: memory, processes and
files. It goes on; one that is paused or hibernated stays so. The checkpoint's name is
printed. It stays when the sandbox, its pool and its template are gone, and when the
machine restarts, until agentrun checkpoint rm.

agentrun checkpoint restore makes new sandboxes that continue from there.`,
		Example: `  agentrun checkpoint agent-session-1 --name before-the-migration
  agentrun checkpoint ls
  agentrun checkpoint restore before-the-migration --name second-try
  agentrun checkpoint rm before-the-migration`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: o.complete(first, "sandboxes"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.with(func(c *client.Client) error {
				made, err := c.Checkpoint(cmd.Context(), args[0], rest.CheckpointCreate{Name: name}, "")
				if err != nil {
					return err
				}
				return printOne(cmd.OutOrStdout(), asJSON, made.Name, made)
			})
		},
	}
	f := cmd.Flags()
	o.flags(f)
	f.StringVar(&name, "name", "", "name of the checkpoint (default: the sandbox's name and some letters)")
	f.BoolVar(&asJSON, "json", false, "print JSON, with all that is known")
	cmd.AddCommand(newCheckpointListCommand(), newCheckpointRemoveCommand(), newCheckpointRestoreCommand())
	return cmd
}

// printOne prints an object, or its name.
func printOne(w io.Writer, asJSON bool, name string, whole any) error {
	if asJSON {
		return printJSON(w, whole)
	}
	_, err := fmt.Fprintln(w, name)
	return err
}

func newCheckpointListCommand() *cobra.Command {
	var o daemonOptions
	var asJSON bool
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List checkpoints, as agentrun get checkpoints does", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.list(cmd.Context(), cmd.OutOrStdout(), "checkpoints", asJSON)
		},
	}
	o.flags(cmd.Flags())
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON, with all that is known")
	return cmd
}

// list prints all objects of a kind.
func (o *daemonOptions) list(ctx context.Context, w io.Writer, kind string, asJSON bool) error {
	k, err := findKind(kind)
	if err != nil {
		return err
	}
	return o.with(func(c *client.Client) error {
		list, err := k.list(ctx, c, false)
		if err != nil {
			return err
		}
		if asJSON {
			return printJSON(w, wholes(list))
		}
		return printObjects(w, k.header, list)
	})
}

func newCheckpointRemoveCommand() *cobra.Command {
	var o daemonOptions
	cmd := &cobra.Command{
		Use: "rm CHECKPOINT...", Short: "Delete checkpoints; sandboxes that were restored from them stay", Args: cobra.MinimumNArgs(1),
		ValidArgsFunction: o.complete(all, "checkpoints"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.with(func(c *client.Client) error {
				return each(args, func(name string) error { return c.DeleteCheckpoint(cmd.Context(), name) })
			})
		},
	}
	o.flags(cmd.Flags())
	return cmd
}

// restoreOptions are the flags of agentrun checkpoint restore.
type restoreOptions struct {
	daemonOptions
	name          string
	env, metadata []string
	timeout, idle time.Duration
	onTimeout     string
	json          bool
}

func newCheckpointRestoreCommand() *cobra.Command {
	var o restoreOptions
	cmd := &cobra.Command{
		Use:   "restore CHECKPOINT [--name SANDBOX]",
		Short: "Make a sandbox that continues from a checkpoint",
		Long: `Make a sandbox that continues from a checkpoint, with a host name, a machine id and
random numbers of its own. Its name is printed. It can be done any number of times.
Timeouts are not those of the sandbox that the checkpoint is of.`,
		Example:           `  agentrun checkpoint restore before-the-migration --name second-try -e ATTEMPT=2`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: o.complete(first, "checkpoints"),
		RunE: func(cmd *cobra.Command, args []string) error {
			spec, err := o.spec()
			if err != nil {
				return err
			}
			return o.with(func(c *client.Client) error {
				s, err := c.Restore(cmd.Context(), args[0], spec, "")
				if err != nil {
					return err
				}
				return printOne(cmd.OutOrStdout(), o.json, s.Name, s)
			})
		},
	}
	f := cmd.Flags()
	o.flags(f)
	f.StringVar(&o.name, "name", "", "name of the sandbox (default: the checkpoint's name and some letters)")
	f.StringArrayVarP(&o.env, "env", "e", nil, "environment variable NAME=VALUE of the sandbox (repeatable)")
	f.StringArrayVar(&o.metadata, "metadata", nil, "metadata KEY=VALUE of the sandbox (repeatable)")
	f.DurationVar(&o.timeout, "timeout", 0, "how long it may run, such as 30m (default: no limit)")
	f.DurationVar(&o.idle, "idle-timeout", 0, "how long it may be without use (default: no limit)")
	f.StringVar(&o.onTimeout, "on-timeout", "", "what a timeout does: kill, pause or hibernate (default: kill)")
	f.BoolVar(&o.json, "json", false, "print JSON, with all that is known")
	return cmd
}

func (o *restoreOptions) spec() (spec rest.CheckpointRestore, err error) {
	given := sandbox.RestoreSpec{Lifetime: sandbox.Lifetime{
		Timeout: o.timeout, IdleTimeout: o.idle, OnTimeout: sandbox.TimeoutAction(o.onTimeout),
	}}
	if given.Env, err = pairs("--env", o.env); err != nil {
		return spec, err
	}
	if given.Metadata, err = pairs("--metadata", o.metadata); err != nil {
		return spec, err
	}
	spec = restconv.FromRestoreSpec(given)
	spec.Name = o.name
	return spec, nil
}

// pairs reads the NAME=VALUE arguments of a flag.
func pairs(flag string, given []string) (map[string]string, error) {
	if len(given) == 0 {
		return nil, nil
	}
	out := map[string]string{}
	for _, g := range given {
		name, value, ok := strings.Cut(g, "=")
		if !ok || name == "" {
			return nil, fmt.Errorf("%s %q: write NAME=VALUE", flag, g)
		}
		out[name] = value
	}
	return out, nil
}
