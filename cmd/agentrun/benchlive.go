package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/bench"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/vmm/guestmem"
	"github.com/spf13/cobra"
)

func newBenchLiveCommand() *cobra.Command {
	cfg := bench.LiveConfig{VCPUs: 1, Count: 20, Stride: 1, Patience: guestmem.DefaultPatience}
	memory, dirty := byteSize(512<<20), byteSize(100<<20)
	var rootfs, guest string
	var asJSON bool
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
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			cfg.Memory, cfg.Dirty = uint64(memory), uint64(dirty)
			var r bench.LiveReport
			switch {
			case cfg.Count < 1:
				return fmt.Errorf("-n %d: at least 1", cfg.Count)
			case guest == bench.GuestTest:
				r, err = bench.LiveBare(cmd.Context(), cfg)
			case guest != bench.GuestLinux:
				return fmt.Errorf("--guest %q: linux or test", guest)
			case rootfs == "":
				return errors.New("--rootfs is missing: a folder with a root filesystem, or an EROFS image of one")
			default:
				cfg.Engine, _ = pick.Choose(cfg.Engine)
				r, err = benchLiveLinux(cmd.Context(), cfg, rootfs, cmd.ErrOrStderr())
			}
			if err != nil {
				return err
			}
			return printBench(cmd.OutOrStdout(), r, asJSON)
		},
	}
	f := cmd.Flags()
	f.StringVar(&rootfs, "rootfs", "", "folder with a root filesystem that has the program touch-pages (guest/rootfs), or an EROFS image of one")
	f.StringVar(&guest, "guest", bench.GuestLinux, "linux, or test for the bare guest")
	f.IntVarP(&cfg.Count, "count", "n", cfg.Count, "how many forks of each kind")
	f.IntVar(&cfg.VCPUs, "cpus", cfg.VCPUs, "processors of the microVM")
	f.IntVar(&cfg.Stride, "stride", cfg.Stride, "write every page (1), every fourth (4), …")
	f.DurationVar(&cfg.Patience, "patience", cfg.Patience, "how long the copy of a bare guest gives way to it; 0 does not")
	f.Var(&memory, "memory", "RAM of the microVM")
	f.Var(&dirty, "dirty", "memory written before each fork")
	engineFlag(f, &cfg.Engine)
	f.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func benchLiveLinux(ctx context.Context, cfg bench.LiveConfig, rootfs string, stderr io.Writer) (_ bench.LiveReport, err error) {
	root, cleanup, err := rootPath(ctx, rootfs, cfg.Engine, stderr)
	if err != nil {
		return bench.LiveReport{}, err
	}
	defer func() { err = errors.Join(err, cleanup()) }()
	cfg.Root = root
	if cfg.Folder, err = os.MkdirTemp("", "agentrun-bench-"); err != nil {
		return bench.LiveReport{}, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(cfg.Folder)) }()
	return bench.Live(ctx, cfg)
}
