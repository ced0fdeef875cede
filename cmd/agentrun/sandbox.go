package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/local"
	"github.com/spf13/cobra"
)

// forkOptions are the flags of agentrun fork.
type forkOptions struct {
	count  int
	names  []string
	limits engine.Limits
	policy microvm.JailPolicy
}

func newForkCommand() *cobra.Command {
	var o forkOptions
	cmd := &cobra.Command{
		Use:   "fork SNAPSHOT|SANDBOX [-n COUNT | --name NAME...]",
		Short: "Make sandboxes that continue from a snapshot or from a running sandbox",
		Long: `Make sandboxes that continue from a snapshot, or from a running sandbox, which is
frozen once and goes on. Each has its own memory, disks, host name, machine id
and random numbers. They run until agentrun rm.

The names are printed, one per line. A fork that fails does not stop the others;
the exit code is 125 if any failed.`,
		Example: `  agentrun fork base -n 3
  agentrun fork base-1 --name try-a --name try-b`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.run(cmd.Context(), args[0], cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.IntVarP(&o.count, "count", "n", 1, "how many")
	f.StringArrayVar(&o.names, "name", nil, "name of a fork (repeatable; default: the source's name and a number)")
	limitFlags(f, &o.limits)
	policyFlags(f, &o.policy)
	cmd.MarkFlagsMutuallyExclusive("count", "name")
	return cmd
}

func (o *forkOptions) run(ctx context.Context, source string, stdout io.Writer) error {
	from, err := local.ParseName(source)
	if err != nil {
		return err
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
		if wanted == nil {
			if wanted, err = s.FreeNames(from, o.count); err != nil {
				return err
			}
		}
		outcomes, err := s.Fork(ctx, from, wanted, o.limits)
		if err != nil {
			return err
		}
		var failed []error
		for i, err := range outcomes {
			if err != nil {
				failed = append(failed, fmt.Errorf("%s: %w", wanted[i], err))
				continue
			}
			if _, err := fmt.Fprintln(stdout, wanted[i]); err != nil {
				return err
			}
		}
		return errors.Join(failed...)
	})
}

func newExecCommand() *cobra.Command {
	var o execOptions
	var policy microvm.JailPolicy // to wake a sandbox is to start it
	cmd := &cobra.Command{
		Use:   "exec SANDBOX [flags] -- COMMAND [ARG...]",
		Short: "Run a command in a sandbox",
		Long: `Run a command in a sandbox made by agentrun fork and return its exit code:
the command's own, 128+N if signal N ended it, 124 if --timeout did, and 125 if
it could not be run. A sandbox that is paused or hibernated goes on.`,
		Example: `  agentrun exec base-1 -- uname -a
  agentrun exec -it base-1 -- sh`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			name, err := local.ParseName(args[0])
			if err != nil {
				return err
			}
			argv := args[1:]
			if argv[0] == "--" {
				// Flags end at the sandbox's name, so that the command's own are
				// left alone, and what separates it is left, too.
				argv = argv[1:]
			}
			if len(argv) == 0 {
				return errors.New("exec: no command given after the sandbox's name")
			}
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
		},
	}
	cmd.Flags().SetInterspersed(false)
	o.flags(cmd.Flags())
	policyFlags(cmd.Flags(), &policy)
	return cmd
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
	return &cobra.Command{
		Use:   "rm NAME...",
		Short: "End and forget sandboxes, delete snapshots",
		Long: `End and forget sandboxes, delete snapshots. Sandboxes do not need the snapshot
they came from; what they share is deleted with the last that uses it.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withStore(startsNothing, func(s *local.Store) error {
				var errs []error
				for _, a := range args {
					name, err := local.ParseName(a)
					if err == nil {
						err = s.Remove(cmd.Context(), name)
					}
					errs = append(errs, err)
				}
				return errors.Join(errs...)
			})
		},
	}
}
