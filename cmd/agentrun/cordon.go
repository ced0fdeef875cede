package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"github.com/spf13/cobra"
)

func newCordonCommand() *cobra.Command {
	var o daemonOptions
	cmd := &cobra.Command{
		Use:   "cordon",
		Short: "Have the daemon make no sandboxes; what runs goes on",
		Long: `Have the daemon make no sandboxes, and fill no pools: claims, forks and restores are
refused as "cordoned". What runs goes on. That holds over restarts, until agentrun uncordon.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.with(func(c *client.Client) error {
				_, err := c.Cordon(cmd.Context())
				return said(cmd.OutOrStdout(), "cordoned", err)
			})
		},
	}
	o.flags(cmd.Flags())
	return cmd
}

func newUncordonCommand() *cobra.Command {
	var o daemonOptions
	cmd := &cobra.Command{
		Use: "uncordon", Short: "Have the daemon make sandboxes again", Args: cobra.NoArgs,
		Long: `End what agentrun cordon or agentrun drain began. What was hibernated stays so until it
is used.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.with(func(c *client.Client) error {
				_, err := c.Uncordon(cmd.Context())
				return said(cmd.OutOrStdout(), "uncordoned", err)
			})
		},
	}
	o.flags(cmd.Flags())
	return cmd
}

func newDrainCommand() *cobra.Command {
	var o daemonOptions
	var wait bool
	cmd := &cobra.Command{
		Use:   "drain",
		Short: "Cordon the daemon, and hibernate what runs",
		Long: `Cordon the daemon, end what waits in pools, hibernate what runs, and wake nothing up
until agentrun uncordon. The command waits until nothing runs; the daemon goes on without it.
A sandbox that cannot be hibernated is named with the reason, and tried again. What holds
secrets is sealed on this node's disk and never leaves it; the command says how much that is.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.with(func(c *client.Client) error {
				_, err := c.Drain(cmd.Context())
				if err != nil || !wait {
					return said(cmd.OutOrStdout(), "draining", err)
				}
				return drained(cmd.Context(), c, cmd.OutOrStdout(), cmd.ErrOrStderr())
			})
		},
	}
	o.flags(cmd.Flags())
	cmd.Flags().BoolVar(&wait, "wait", true, "wait until nothing runs")
	return cmd
}

func said(w io.Writer, what string, err error) error {
	if err == nil {
		_, err = fmt.Fprintln(w, what)
	}
	return err
}

// drained waits until no sandbox runs, and prints why some still do.
func drained(ctx context.Context, c *client.Client, stdout, stderr io.Writer) error {
	told, sealed := map[string]string{}, 0
	err := c.WatchNode(ctx, func(e rest.ObjectEvent) (more bool, err error) {
		switch n := e.Node; {
		case n == nil:
			return true, nil
		case n.Cordon == nil || !n.Cordon.Drain:
			return false, errors.New("somebody else has ended the drain")
		default:
			for _, p := range n.Cordon.Problems {
				if name := p.Namespace + "/" + p.Name; told[name] != p.Problem {
					told[name] = p.Problem
					_, err = fmt.Fprintf(stderr, "agentrun: %s still runs: %s\n", name, p.Problem)
				}
			}
			sealed = n.Cordon.Sealed
			return n.Cordon.Left > 0, err
		}
	})
	if err == nil && sealed > 0 {
		_, err = fmt.Fprintf(stderr, "agentrun: %d hibernated sandboxes and checkpoints hold secrets: they are sealed for this node, and never leave it\n", sealed)
	}
	return said(stdout, "drained", err)
}
