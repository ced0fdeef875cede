package main

import (
	"context"
	"fmt"

	"agentrun.dev/bench"
	"agentrun.dev/internal/client/local"
	"github.com/spf13/cobra"
)

func newDataPlaneCommand() *cobra.Command {
	cfg := bench.DataPlaneConfig{Count: 200, Rounds: 5, Bytes: 64 << 20}
	o := options{memory: 512 << 20}
	cmd := &cobra.Command{
		Use:   "dataplane --image IMAGE",
		Short: "Programs, code, files and a port by the gRPC API, beside the REST API",
		Long: `Do the same in one sandbox by requests to the REST API and by sessions over the gRPC API, as
a gateway has them, in turns, both on Unix sockets. The image has Python.`,
		Example: `  build/bench dataplane --image python:3.12-slim`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.Count < 1 || cfg.Rounds < 1 || cfg.Bytes < 16 {
				return fmt.Errorf("--count %d, --rounds %d, --bytes %d: at least 1, 1 and 16 are needed", cfg.Count, cfg.Rounds, cfg.Bytes)
			}
			var err error
			if cfg.Images, err = local.OpenImages(); err != nil {
				return err
			}
			return o.measure(cmd, &cfg.Guest, func(ctx context.Context) (report, error) { return bench.DataPlane(ctx, cfg) })
		},
	}
	f := cmd.Flags()
	o.flags(f)
	f.StringVar(&cfg.Image, "image", "", "image of the sandbox")
	f.IntVarP(&cfg.Count, "count", "n", cfg.Count, "how often each thing is done each way")
	f.IntVar(&cfg.Rounds, "rounds", cfg.Rounds, "how often --bytes are moved each way")
	f.IntVar(&cfg.Bytes, "bytes", cfg.Bytes, "how many bytes are moved where throughput is measured")
	engineFlags(f, &cfg.Guest)
	require(cmd, "image")
	return cmd
}
