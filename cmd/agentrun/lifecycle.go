package main

import (
	"context"
	"errors"

	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/local"
	"github.com/spf13/cobra"
)

func newPauseCommand() *cobra.Command {
	return newLifecycleCommand("pause", "Stop sandboxes where they are; they keep their memory",
		`Stop the processors of sandboxes. They keep their memory and take no CPU time; their
own clocks do not notice. agentrun resume lets them go on, and agentrun exec does so
by itself.`, (*local.Store).Pause)
}

func newResumeCommand() *cobra.Command {
	return newLifecycleCommand("resume", "Let sandboxes go on that were paused or hibernated",
		`Let sandboxes go on that were paused or hibernated. They are what they were: host
name, machine id, processes, memory and disks. The wall clock is set.`, (*local.Store).Resume)
}

func newHibernateCommand() *cobra.Command {
	return newLifecycleCommand("hibernate", "Write sandboxes to disk and free their memory",
		`Write sandboxes to disk, memory and processes included, and free their memory. They
survive a restart of the machine. agentrun resume wakes them, and agentrun exec does
so by itself.`, (*local.Store).Hibernate)
}

func newLifecycleCommand(name, short, long string, do func(*local.Store, context.Context, local.Name) error) *cobra.Command {
	var policy microvm.JailPolicy // to wake a sandbox is to start it
	cmd := &cobra.Command{
		Use: name + " SANDBOX...", Short: short, Long: long, Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withStore(policy, func(s *local.Store) error {
				var errs []error
				for _, a := range args {
					n, err := local.ParseName(a)
					if err == nil {
						err = do(s, cmd.Context(), n)
					}
					errs = append(errs, err)
				}
				return errors.Join(errs...)
			})
		},
	}
	policyFlags(cmd.Flags(), &policy)
	return cmd
}
