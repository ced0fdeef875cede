package main

import (
	"context"
	"fmt"

	"agentrun.dev/bench"
	"agentrun.dev/cmd/internal/cli"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/vmm/guestmem"
	"github.com/spf13/cobra"
)

func newLiveCommand() *cobra.Command {
	cfg := bench.LiveConfig{Guest: bench.Guest{VCPUs: 1}, Count: 20, Stride: 1, Patience: guestmem.DefaultPatience}
	o := options{memory: 512 << 20}
	dirty := cli.ByteSize(100 << 20)
	var guest string
	cmd := &cobra.Command{
		Use:   "live (--rootfs DIR | --guest test)",
		Short: "Live forks: the pause, the stalls and the children of a busy source",
		Long: `Fork a running microVM again and again, each time after it has written some of
its memory, and measure, beside the floor of the same run: for how long it stands
still, the longest of its writes while it is being copied, its passes over its
memory during and after the fork, and the time from the call to the first answer
of one and of ten children.

--guest test measures the host's side, in one process, with a bare guest that
runs on any KVM and has read all its memory before.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.Dirty = uint64(dirty)
			if cfg.Count < 1 {
				return fmt.Errorf("-n %d: at least 1", cfg.Count)
			}
			if err := o.checkGuest(guest); err != nil {
				return err
			}
			if guest == bench.GuestTest {
				cfg.Engine = pick.MicroVM
			}
			return o.measure(cmd, &cfg.Guest, func(ctx context.Context) (report, error) {
				if guest == bench.GuestTest {
					return bench.LiveBare(ctx, cfg)
				}
				return bench.Live(ctx, cfg)
			})
		},
	}
	f := cmd.Flags()
	o.flags(f)
	o.rootFlags(f, &cfg.Guest, " that has the program touch-pages (guest/rootfs)")
	guestFlag(f, &guest)
	f.IntVarP(&cfg.Count, "count", "n", cfg.Count, "how many forks of each kind")
	f.IntVar(&cfg.Stride, "stride", cfg.Stride, "write every page (1), every fourth (4), …")
	f.DurationVar(&cfg.Patience, "patience", cfg.Patience, "how long the copy of a bare guest gives way to it; 0 does not")
	f.Var(&dirty, "dirty", "memory written before each fork")
	cli.EngineFlag(f, &cfg.Engine)
	return cmd
}
