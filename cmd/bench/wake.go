package main

import (
	"context"

	"agentrun.dev/bench"
	"github.com/spf13/cobra"
)

func newWakeCommand() *cobra.Command {
	cfg := bench.WakeConfig{Guest: bench.Guest{VCPUs: 1}, Count: 10, Fill: 96}
	o := options{memory: 256 << 20}
	cmd := &cobra.Command{
		Use:   "wake --rootfs DIR",
		Short: "Sandboxes that hibernate and wake, beside a cold fork and reading their layers",
		Long: `Fork a sandbox, fill its memory, write it to disk and wake it, with nothing of it in
memory or in the host's caches. Beside that, in turns: reading and hashing the layers
that the sandbox was written to, and the same fork with these in memory.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.measure(cmd, &cfg.Guest, func(ctx context.Context) (report, error) { return bench.Wake(ctx, cfg) })
		},
	}
	f := cmd.Flags()
	o.flags(f)
	o.rootFlags(f, &cfg.Guest, "")
	f.IntVarP(&cfg.Count, "count", "n", cfg.Count, "how many sandboxes, one after the other")
	f.IntVar(&cfg.Fill, "fill", cfg.Fill, "how many MiB of each are filled")
	engineFlags(f, &cfg.Guest)
	require(cmd, "rootfs")
	return cmd
}
