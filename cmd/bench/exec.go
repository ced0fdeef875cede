package main

import (
	"context"
	"fmt"

	"agentrun.dev/bench"
	"agentrun.dev/internal/client/local"
	"github.com/spf13/cobra"
)

func newExecCommand() *cobra.Command {
	cfg := bench.ExecConfig{Count: 100, Clients: []int{1, 20}, Program: "true"}
	o := options{memory: 256 << 20}
	cmd := &cobra.Command{
		Use:   "exec --image IMAGE",
		Short: "A program by the REST API, beside a bare call to the sandbox's agent",
		Long: `Run a program that does nothing in one sandbox, by a bare call to its agent and by a
request to the REST API on a Unix socket, in turns, with several clients at once.`,
		Example: `  build/bench exec --image python:3.12-slim --clients 1,20`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.Count < 1 {
				return fmt.Errorf("--count %d: at least 1 is needed", cfg.Count)
			}
			for _, n := range cfg.Clients {
				if n < 1 {
					return fmt.Errorf("--clients %d: at least 1 is needed", n)
				}
			}
			var err error
			if cfg.Images, err = local.OpenImages(); err != nil {
				return err
			}
			return o.measure(cmd, &cfg.Guest, func(ctx context.Context) (report, error) { return bench.Exec(ctx, cfg) })
		},
	}
	f := cmd.Flags()
	o.flags(f)
	f.StringVar(&cfg.Image, "image", "", "image to run the program of")
	f.StringVar(&cfg.Program, "program", cfg.Program, "program that does nothing")
	f.IntVarP(&cfg.Count, "count", "n", cfg.Count, "how often each client runs it, each way")
	f.IntSliceVar(&cfg.Clients, "clients", cfg.Clients, "how many clients at once, one measurement for each number")
	engineFlags(f, &cfg.Guest)
	require(cmd, "image")
	return cmd
}
