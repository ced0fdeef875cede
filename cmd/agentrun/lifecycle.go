package main

import (
	"context"

	"agentrun.dev/cmd/internal/cli"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/client/local"
	"agentrun.dev/internal/engine/microvm"
	"github.com/spf13/cobra"
)

func newPauseCommand() *cobra.Command {
	return newLifecycleCommand("pause", "Stop sandboxes where they are; they keep their memory",
		`Stop the processors of sandboxes. They keep their memory and take no CPU time; their
own clocks do not notice. agentrun resume lets them go on, and agentrun exec does so
by itself.`, client.Pause, (*local.Store).Pause)
}

func newResumeCommand() *cobra.Command {
	return newLifecycleCommand("resume", "Let sandboxes go on that were paused or hibernated",
		`Let sandboxes go on that were paused or hibernated. They are what they were: host
name, machine id, processes, memory and disks. The wall clock is set.`, client.Resume, (*local.Store).Resume)
}

func newHibernateCommand() *cobra.Command {
	return newLifecycleCommand("hibernate", "Write sandboxes to disk and free their memory",
		`Write sandboxes to disk, memory and processes included, and free their memory. They
survive a restart of the machine. agentrun resume wakes them, and agentrun exec does
so by itself.`, client.Hibernate, (*local.Store).Hibernate)
}

func newLifecycleCommand(name, short, long string, verb client.Verb, do func(*local.Store, context.Context, local.Name) error) *cobra.Command {
	var daemon daemonOptions
	var policy microvm.JailPolicy // to wake a sandbox is to start it
	cmd := &cobra.Command{
		Use: name + " SANDBOX...", Short: short, Long: long, Args: cobra.MinimumNArgs(1),
		ValidArgsFunction: daemon.complete(all, "sandboxes"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return each(args, func(a string) error {
				return daemon.choose(a, func() error {
					return daemon.with(func(c *client.Client) error {
						_, err := c.Do(cmd.Context(), a, verb)
						return err
					})
				}, func() error {
					return withStore(policy, func(s *local.Store) error { return do(s, cmd.Context(), local.Name(a)) })
				})
			})
		},
	}
	daemon.flags(cmd.Flags())
	cli.PolicyFlags(cmd.Flags(), &policy)
	return cmd
}
