package main

import (
	"context"
	"fmt"

	"agentrun.dev/bench"
	"agentrun.dev/internal/client/local"
	"github.com/spf13/cobra"
)

func newFanoutCommand() *cobra.Command {
	cfg := bench.FanoutConfig{
		Count: 100, Parallel: 8,
		Warmup: "import numpy", Code: "numpy.zeros(5).tolist()", Cold: "python3 -c 'import numpy; print(numpy.zeros(5).tolist())'",
	}
	o := options{memory: 256 << 20}
	cmd := &cobra.Command{
		Use:   "fanout --image IMAGE",
		Short: "Many forks of an interpreter that has imported numpy, each evaluating something",
		Long: `Build a template whose Python kernel has run --warmup, and measure, through all that
the daemon does: so many fresh forks of it, each evaluating --code, until the last
has answered; what one has of its own; and one evaluation in the warm kernel of a
fresh fork beside --cold, a shell command that does the same from the start, in
another. The image is one of this machine's (agentrun image build).`,
		Example: `  agentrun image build --debian bookworm --include python3,python3-numpy -t python:3.12-slim
  build/bench fanout --image python:3.12-slim -n 100`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.Count < 1 || cfg.Parallel < 1 {
				return fmt.Errorf("--count %d, --parallel %d: at least 1 is needed", cfg.Count, cfg.Parallel)
			}
			var err error
			if cfg.Images, err = local.OpenImages(); err != nil {
				return err
			}
			return o.measure(cmd, &cfg.Guest, func(ctx context.Context) (report, error) { return bench.Fanout(ctx, cfg) })
		},
	}
	f := cmd.Flags()
	o.flags(f)
	f.StringVar(&cfg.Image, "image", "", "image with Python and what the code needs")
	f.IntVarP(&cfg.Count, "count", "n", cfg.Count, "how many forks")
	f.IntVar(&cfg.Parallel, "parallel", cfg.Parallel, "how many at once")
	f.StringVar(&cfg.Warmup, "warmup", cfg.Warmup, "Python that runs before the snapshot")
	f.StringVar(&cfg.Code, "code", cfg.Code, "Python that each fork evaluates")
	f.StringVar(&cfg.Cold, "cold", cfg.Cold, "shell command that does the same from the start")
	engineFlags(f, &cfg.Guest)
	require(cmd, "image")
	return cmd
}
