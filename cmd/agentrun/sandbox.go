package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/cmd/internal/cli"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/client/local"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/sandbox"
	"github.com/spf13/cobra"
)

// forkOptions are the flags of agentrun fork.
type forkOptions struct {
	count  int
	names  []string
	limits engine.Limits
	policy microvm.JailPolicy
	daemon daemonOptions
	json   bool
	// verbose prints the cost on stderr.
	verbose bool
	// network is a file with a network policy.
	network string
	// atomic makes either all children or no child. checkpoint names a
	// checkpoint of the same instant.
	atomic     bool
	checkpoint string
}

func newForkCommand() *cobra.Command {
	var o forkOptions
	cmd := &cobra.Command{
		Use:   "fork SNAPSHOT|SANDBOX [-n COUNT | --name NAME...]",
		Short: "Make sandboxes that continue from a snapshot or from a running sandbox",
		Long: `Make sandboxes that continue from a snapshot, or from one instant of a running
sandbox, which stands still for milliseconds and goes on while its memory is
copied. Each has its own memory, disks, host name, machine id and random numbers.
They run until agentrun rm.

The names are printed, one per line. A fork that fails does not stop the others;
the exit code is 125 if any failed. --verbose says what it took, --json prints
both.`,
		Example: `  agentrun fork base -n 3
  agentrun fork base-1 --name try-a --name try-b`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: o.daemon.complete(first, "sandboxes"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.daemon.choose(args[0], func() error {
				return o.forkInDaemon(cmd.Context(), args[0], cmd.OutOrStdout(), cmd.ErrOrStderr())
			}, func() error {
				return o.run(cmd.Context(), args[0], cmd.OutOrStdout(), cmd.ErrOrStderr())
			})
		},
	}
	f := cmd.Flags()
	f.BoolVar(&o.json, "json", false, "print JSON: names, failures, and what it took")
	f.BoolVarP(&o.verbose, "verbose", "v", false, "say on standard error what it took")
	f.IntVarP(&o.count, "count", "n", 1, "how many")
	f.StringVar(&o.daemon.namespace, "namespace", string(sandbox.DefaultNamespace), "namespace of a sandbox of the daemon")
	o.daemon.serverFlag(f)
	f.StringArrayVar(&o.names, "name", nil, "name of a fork (repeatable; default: the source's name and a number); a single one with -n is followed by a number")
	f.StringVar(&o.checkpoint, "checkpoint", "", "name of a checkpoint of the same instant, of which the forks are made; of a sandbox of the daemon")
	f.BoolVar(&o.atomic, "atomic", false, "all forks, or none; of a sandbox of the daemon")
	f.StringVar(&o.network, "network-policy", "", "YAML file of a network policy that narrows the children's; for a sandbox of the daemon")
	limitFlags(f, &o.limits)
	cli.PolicyFlags(f, &o.policy)
	return cmd
}

// forkInDaemon forks a sandbox of the daemon. With one --name this is the fork's name, and
// the children become NAME-1, NAME-2, …. With several each child has a name of its own.
func (o *forkOptions) forkInDaemon(ctx context.Context, source string, stdout, stderr io.Writer) error {
	if o.limits != (engine.Limits{}) {
		return errors.New("a fork of the daemon has the limits of its source")
	}
	spec := rest.ForkCreate{Replicas: o.count, Atomic: o.atomic, Checkpoint: o.checkpoint}
	if o.network != "" {
		p, err := readPolicy(o.network, nil)
		if err != nil {
			return fmt.Errorf("--network-policy: %w", err)
		}
		spec.NetworkPolicy = new(restconv.FromNetworkPolicy(p))
	}
	switch {
	case len(o.names) == 1:
		spec.Name = o.names[0]
	case len(o.names) > 1 && o.count != 1:
		return errNamesAndCount()
	case len(o.names) > 1:
		spec.Names, spec.Replicas = o.names, len(o.names)
	}
	return o.daemon.with(func(c *client.Client) error {
		begin := time.Now()
		f, err := c.Fork(ctx, source, spec, "")
		if err != nil {
			return err
		}
		took := time.Since(begin)
		var failed []error
		for _, child := range f.Children {
			if child.Problem != "" {
				failed = append(failed, fmt.Errorf("%s: %s", child.Name, child.Problem))
			} else if !o.json {
				if _, err := fmt.Fprintln(stdout, child.Name); err != nil {
					return err
				}
			}
		}
		if o.json {
			if err := printJSON(stdout, f); err != nil {
				return err
			}
		}
		if o.verbose {
			if err := explainFork(f, took, stderr); err != nil {
				return err
			}
		}
		return errors.Join(failed...)
	})
}

func errNamesAndCount() error {
	return errors.New("-n and --name: a name for each fork, or how many, but not both")
}

func (o *forkOptions) run(ctx context.Context, source string, stdout, stderr io.Writer) error {
	from, err := local.ParseName(source)
	if err != nil {
		return err
	}
	if o.atomic || o.checkpoint != "" {
		return fmt.Errorf("--atomic and --checkpoint: %s is not a sandbox of the daemon", from)
	}
	if o.network != "" {
		return fmt.Errorf("--network-policy: %s is not a sandbox of the daemon, and has no network", from)
	}
	if o.count < 1 || o.count > 1000 {
		return fmt.Errorf("-n %d: between 1 and 1000 are possible", o.count)
	}
	return withStore(o.policy, func(s *local.Store) error {
		var wanted []local.Name
		for _, n := range o.names {
			parsed, err := local.ParseName(n)
			if err != nil {
				return err
			}
			wanted = append(wanted, parsed)
		}
		if wanted != nil && o.count != 1 {
			return errNamesAndCount()
		}
		if wanted == nil {
			if wanted, err = s.FreeNames(from, o.count); err != nil {
				return err
			}
		}
		begin := time.Now()
		f, err := s.Fork(ctx, from, wanted, o.limits)
		if err != nil {
			return err
		}
		return o.report(newForkReport(wanted, f, time.Since(begin)), stdout, stderr)
	})
}

func newExecCommand() *cobra.Command {
	var o execOptions
	var daemon daemonOptions
	var policy microvm.JailPolicy // to wake a sandbox is to start it
	cmd := &cobra.Command{
		Use:   "exec SANDBOX [flags] -- COMMAND [ARG...]",
		Short: "Run a command in a sandbox",
		Long: `Run a command in a sandbox, of the daemon or made by agentrun fork without one, and
return its exit code:
the command's own, 128+N if signal N ended it, 124 if --timeout did, and 125 if
it could not be run. A sandbox that is paused or hibernated goes on.`,
		Example: `  agentrun exec base-1 -- uname -a
  agentrun exec -it base-1 -- sh`,
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: daemon.complete(first, "sandboxes"),
		RunE: func(cmd *cobra.Command, args []string) error {
			name, err := local.ParseName(args[0])
			if err != nil {
				return err
			}
			argv := args[1:]
			if argv[0] == "--" {
				// Flags end at the sandbox's name, so that cobra does not parse
				// the command's own flags. So cobra leaves the separator in the
				// arguments.
				argv = argv[1:]
			}
			if len(argv) == 0 {
				return errors.New("exec: no command given after the sandbox's name")
			}
			return daemon.choose(args[0], func() error {
				return daemon.with(func(c *client.Client) error {
					return o.execInDaemon(cmd.Context(), c, args[0], argv, cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
				})
			}, func() error {
				return o.execInStore(cmd, name, policy, argv)
			})
		},
	}
	cmd.Flags().SetInterspersed(false)
	o.flags(cmd.Flags())
	daemon.flags(cmd.Flags())
	cli.PolicyFlags(cmd.Flags(), &policy)
	return cmd
}

// execInStore is agentrun exec in a sandbox that is kept without a daemon.
func (o *execOptions) execInStore(cmd *cobra.Command, name local.Name, policy microvm.JailPolicy, argv []string) error {
	return withStore(policy, func(s *local.Store) (err error) {
		sb, err := s.Attach(cmd.Context(), name)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, sb.Detach()) }()
		status, err := o.exec(cmd.Context(), sb.Agent(), argv, cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		if err != nil {
			return err
		}
		return result(status)
	})
}

func newListCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List snapshots and sandboxes",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withStore(startsNothing, func(s *local.Store) error {
				entries, err := s.List()
				if err != nil {
					return err
				}
				if asJSON {
					e := json.NewEncoder(cmd.OutOrStdout())
					e.SetIndent("", "  ")
					return e.Encode(entries)
				}
				return printList(cmd.OutOrStdout(), entries)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func printList(w io.Writer, entries []local.Entry) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	if _, err := fmt.Fprintln(t, "NAME\tKIND\tSTATUS\tCREATED\tCPUS\tMEMORY\tOWN\tSTORED\tUNSHARED\tENGINE"); err != nil {
		return err
	}
	size := func(n uint64) string {
		if n == 0 {
			return "-"
		}
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	for _, e := range entries {
		_, err := fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\n", e.Name, e.Kind, e.Status,
			e.Created.Local().Format(time.DateTime), e.VCPUs, size(e.Memory), size(e.Own), size(e.Stored), size(e.Unshared), e.Engine)
		if err != nil {
			return err
		}
	}
	return t.Flush()
}

func newRemoveCommand() *cobra.Command {
	return newEndCommand(cobra.Command{
		Use:   "rm NAME...",
		Short: "End and forget sandboxes, delete snapshots",
		Long: `End and forget sandboxes, delete snapshots. Sandboxes do not need the snapshot
they came from; what they share is deleted with the last that uses it.`,
	}, (*local.Store).Remove)
}

func newKillCommand() *cobra.Command {
	return newEndCommand(cobra.Command{
		Use:   "kill SANDBOX...",
		Short: "End and forget sandboxes",
		Long:  "End and forget sandboxes, as agentrun rm does. A snapshot is refused.",
	}, (*local.Store).Kill)
}

// newEndCommand completes a command that ends sandboxes. It calls without for a sandbox
// that is not the daemon's.
func newEndCommand(cmd cobra.Command, without func(*local.Store, context.Context, local.Name) error) *cobra.Command {
	var o daemonOptions
	cmd.Args = cobra.MinimumNArgs(1)
	cmd.ValidArgsFunction = o.complete(all, "sandboxes")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return each(args, func(a string) error {
			return o.choose(a, func() error {
				return o.with(func(c *client.Client) error {
					_, err := c.Kill(cmd.Context(), a)
					return err
				})
			}, func() error {
				return withStore(startsNothing, func(s *local.Store) error { return without(s, cmd.Context(), local.Name(a)) })
			})
		})
	}
	o.flags(cmd.Flags())
	return &cmd
}
