package main

import (
	"errors"
	"fmt"
	"io"
	"text/tabwriter"

	"agentrun.dev/api/rest"
	"agentrun.dev/cmd/internal/cli"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/sandbox"
	"github.com/spf13/cobra"
)

func newQuotaCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "quota",
		Short: "Bound what a namespace may use of this machine",
		Long: `Bound what the sandboxes of a namespace may use together: memory, which those that
run, are paused or wait in pools reserve; how many there are, hibernated ones
included; and what templates, hibernated ones and checkpoints take on disk. What is beyond it is
refused with insufficient_capacity; a pool waits. What is there already stays.`,
	}
	cmd.AddCommand(newQuotaSetCommand(), newQuotaGetCommand(), newQuotaDeleteCommand())
	return cmd
}

func newQuotaSetCommand() *cobra.Command {
	var o daemonOptions
	var memory, storage cli.ByteSize
	var sandboxes int
	cmd := &cobra.Command{
		Use:     "set",
		Short:   "Set the quota of a namespace; what is not given is not bounded",
		Example: `  agentrun quota set -n team-a --memory 8G --sandboxes 20 --storage 50G`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if memory == 0 && sandboxes == 0 && storage == 0 {
				return errors.New("give --memory, --sandboxes or --storage; agentrun quota delete removes a quota")
			}
			return o.with(func(c *client.Client) error {
				q, err := c.PutQuota(cmd.Context(), restconv.FromQuota(sandbox.Quota{Memory: uint64(memory), Sandboxes: sandboxes, Storage: uint64(storage)}))
				if err != nil {
					return err
				}
				return printQuota(cmd.OutOrStdout(), q)
			})
		},
	}
	f := cmd.Flags()
	o.flags(f)
	f.Var(&memory, "memory", "memory that its sandboxes may reserve together")
	f.IntVar(&sandboxes, "sandboxes", 0, "how many sandboxes it may have")
	f.Var(&storage, "storage", "what its templates, hibernated sandboxes and checkpoints may take on disk together")
	return cmd
}

func newQuotaGetCommand() *cobra.Command {
	var o daemonOptions
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "get",
		Short: "Show the quota of a namespace and what is used of it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.with(func(c *client.Client) error {
				q, err := c.Quota(cmd.Context())
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), q)
				}
				return printQuota(cmd.OutOrStdout(), q)
			})
		},
	}
	o.flags(cmd.Flags())
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func newQuotaDeleteCommand() *cobra.Command {
	var o daemonOptions
	cmd := &cobra.Command{
		Use:   "delete",
		Short: "Remove the quota of a namespace",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.with(func(c *client.Client) error { return c.DeleteQuota(cmd.Context()) })
		},
	}
	o.flags(cmd.Flags())
	return cmd
}

func printQuota(w io.Writer, q rest.Quota) error {
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	bound := func(is bool, text string) string {
		if !is {
			return "-"
		}
		return text
	}
	_, err := fmt.Fprintf(t, "NAMESPACE\tRESOURCE\tUSED\tQUOTA\n%s\tmemory\t%dMi\t%s\n%s\tsandboxes\t%d\t%s\n%s\tstorage\t%dMi\t%s\n",
		q.Namespace, q.Used.Memory>>20, bound(q.Spec.Memory > 0, fmt.Sprintf("%dMi", q.Spec.Memory>>20)),
		q.Namespace, q.Used.Sandboxes, bound(q.Spec.Sandboxes > 0, fmt.Sprint(q.Spec.Sandboxes)),
		q.Namespace, q.Used.Storage>>20, bound(q.Spec.Storage > 0, fmt.Sprintf("%dMi", q.Spec.Storage>>20)))
	return errors.Join(err, t.Flush())
}
