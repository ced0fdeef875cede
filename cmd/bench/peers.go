package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"agentrun.dev/bench"
	"agentrun.dev/bench/peers"
	"agentrun.dev/cmd/internal/cli"
	"agentrun.dev/internal/engine/pick"
	"github.com/spf13/cobra"
)

func newPeersCommand() *cobra.Command {
	cfg := peers.Config{Guest: bench.Guest{VCPUs: 1, Engine: pick.MicroVM}, Boots: 3, Warm: 30, Forks: 10, Lives: 3}
	o := options{memory: 256 << 20}
	dirty := cli.ByteSize(100 << 20)
	var plot string
	cmd := &cobra.Command{
		Use:   "peers --rootfs DIR [--python PATH] [--firecracker PATH]",
		Short: "AgentRun beside microsandbox and Firecracker, in one run",
		Long: `Measure AgentRun, microsandbox and Firecracker with the same root filesystem, size
and program, taking turns with each other and with the floor: boot to first
answer, warm ping and exec, fork to first answer and first program, the memory
that a fork alone has, and how long a running source stands still while it is
forked. Every fork ends before the next.

microsandbox needs an interpreter that has its package, at the version that
bench/peers/requirements.txt pins; make bench-peers installs it and runs this.
Firecracker is a binary of yours, which boots AgentRun's own kernel and agent.
A peer that cannot run is named with the reason.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.Dirty = uint64(dirty)
			cfg.Progress = func(format string, args ...any) {
				fmt.Fprintf(cmd.ErrOrStderr(), format+"\n", args...)
			}
			return o.measure(cmd, &cfg.Guest, func(ctx context.Context) (report, error) {
				if err := peerPaths(&cfg, o.rootfs); err != nil {
					return nil, err
				}
				report, err := peers.Run(ctx, cfg)
				if err == nil && plot != "" {
					if err = os.WriteFile(plot, []byte(report.SVG()), 0o600); err != nil {
						err = fmt.Errorf("--plot: %w", err)
					}
				}
				return report, err
			})
		},
	}
	f := cmd.Flags()
	o.flags(f)
	o.rootFlags(f, &cfg.Guest, "")
	f.StringVar(&cfg.Python, "python", "", "Python that has microsandbox")
	f.StringVar(&cfg.Firecracker, "firecracker", "", "Firecracker's binary")
	f.IntVar(&cfg.Boots, "boots", cfg.Boots, "how many boots of each")
	f.IntVar(&cfg.Warm, "warm", cfg.Warm, "how many pings and programs in each source")
	f.IntVarP(&cfg.Forks, "count", "n", cfg.Forks, "how many forks of each")
	f.IntVar(&cfg.Lives, "lives", cfg.Lives, "how many forks of each while its source runs")
	f.Var(&dirty, "dirty", "what the source writes before each of these")
	f.StringVar(&cfg.Program, "program", "/bin/true", "program of the root filesystem whose execution is measured, with its path")
	f.StringVar(&plot, "plot", "", "write a chart to this file (SVG)")
	require(cmd, "rootfs")
	return cmd
}

// peerPaths makes paths absolute, because Firecracker runs in another folder.
// Only microsandbox needs the root filesystem as a folder.
func peerPaths(cfg *peers.Config, rootfs string) (err error) {
	if cfg.Root != rootfs {
		cfg.RootDir = rootfs
	}
	if cfg.Root, err = filepath.Abs(cfg.Root); err != nil {
		return err
	}
	if cfg.Firecracker != "" {
		cfg.Firecracker, err = filepath.Abs(cfg.Firecracker)
	}
	return err
}
