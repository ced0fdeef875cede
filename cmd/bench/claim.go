package main

import (
	"context"
	"fmt"

	"agentrun.dev/bench"
	"github.com/spf13/cobra"
)

func newClaimCommand() *cobra.Command {
	cfg := bench.ClaimConfig{Guest: bench.Guest{VCPUs: 1}, Count: 50, Ready: 10, Burst: 100}
	o := options{memory: 256 << 20}
	cmd := &cobra.Command{
		Use:   "claim --rootfs DIR",
		Short: "Claims of ready sandboxes: forked, answered and paused before",
		Long: `Boot a microVM, freeze it, keep forks of it ready (they have answered once and are
paused) and measure claims: from the call until the sandbox runs and its agent has
confirmed a new identity, beside a warm ping and the floor of the same run.

Then a burst, through the manager of a daemon: --burst claims of a pool with --ready
sandboxes one after the other, none of which ends before the last, and as many again
at once. Those that find no sandbox ready are forks.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.Count < 0 || cfg.Burst < 0 || cfg.Ready < 0 || cfg.Starts < 0 {
				return fmt.Errorf("--count %d, --burst %d, --ready %d, --starts %d: 0 or more", cfg.Count, cfg.Burst, cfg.Ready, cfg.Starts)
			}
			return o.measure(cmd, &cfg.Guest, func(ctx context.Context) (report, error) { return bench.Claim(ctx, cfg) })
		},
	}
	f := cmd.Flags()
	o.flags(f)
	o.rootFlags(f, &cfg.Guest, "")
	f.IntVarP(&cfg.Count, "count", "n", cfg.Count, "how many claims, one after the other; 0 makes only the burst")
	f.IntVar(&cfg.Ready, "ready", cfg.Ready, "how many sandboxes wait")
	f.IntVar(&cfg.Spares, "shells", 0, "how many forks beyond them wait half made")
	f.IntVar(&cfg.Burst, "burst", cfg.Burst, "how many claims in a row, and then at once, through the manager; 0 makes none")
	f.IntVar(&cfg.Starts, "starts", 0, "how many machines the manager starts at once in the burst (default: by processors)")
	f.StringVar(&cfg.Program, "program", "true", "program of the root filesystem that warms it up")
	f.StringVar(&cfg.Warm, "warm", "", "shell script that warms the guest up before it is frozen")
	engineFlags(f, &cfg.Guest)
	require(cmd, "rootfs")
	return cmd
}
