package main

import (
	"errors"
	"fmt"
	"os"

	"agentrun.dev/bench"
	"agentrun.dev/internal/engine/pick"
	"github.com/spf13/cobra"
)

func newBenchExecCommand() *cobra.Command {
	cfg := bench.ExecConfig{Count: 100, Clients: []int{1, 20}, Program: "true"}
	memory := byteSize(256 << 20)
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "exec --image IMAGE",
		Short: "A program by the REST API, beside a bare call to the sandbox's agent",
		Long: `Run a program that does nothing in one sandbox, by a bare call to its agent and by a
request to the REST API on a Unix socket, in turns, with several clients at once.`,
		Example: `  agentrun bench exec --image python:3.12-slim --clients 1,20`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if cfg.Count < 1 {
				return fmt.Errorf("--count %d: at least 1 is needed", cfg.Count)
			}
			for _, n := range cfg.Clients {
				if n < 1 {
					return fmt.Errorf("--clients %d: at least 1 is needed", n)
				}
			}
			if cfg.Images, err = openImages(); err != nil {
				return err
			}
			cfg.Engine, _ = pick.Choose(cfg.Engine)
			cfg.Memory = uint64(memory)
			if cfg.Folder, err = os.MkdirTemp("", "agentrun-bench-"); err != nil {
				return err
			}
			defer func() { err = errors.Join(err, os.RemoveAll(cfg.Folder)) }()
			report, err := bench.Exec(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			return printBench(cmd.OutOrStdout(), report, asJSON)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Image, "image", "", "image to run the program of (required)")
	f.StringVar(&cfg.Program, "program", cfg.Program, "program that does nothing")
	f.IntVarP(&cfg.Count, "count", "n", cfg.Count, "how often each client runs it, each way")
	f.IntSliceVar(&cfg.Clients, "clients", cfg.Clients, "how many clients at once, one measurement for each number")
	f.Var(&memory, "memory", "RAM of the sandbox")
	engineFlag(f, &cfg.Engine)
	f.BoolVar(&asJSON, "json", false, "print JSON")
	policyFlags(f, &cfg.Jail)
	if err := cmd.MarkFlagRequired("image"); err != nil {
		panic(err) // the flag was defined above
	}
	return cmd
}
