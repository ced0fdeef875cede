package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"agentrun.dev/bench/peers"
	"agentrun.dev/internal/engine/pick"
	"github.com/spf13/cobra"
)

func newBenchPeersCommand() *cobra.Command {
	cfg := peers.Config{VCPUs: 1, Boots: 3, Warm: 30, Forks: 10, Lives: 3}
	memory, dirty := byteSize(256<<20), byteSize(100<<20)
	var rootfs, plot string
	var asJSON bool
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
Who cannot run is named with the reason.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.Memory, cfg.Dirty = uint64(memory), uint64(dirty)
			cfg.Progress = func(format string, args ...any) {
				fmt.Fprintf(cmd.ErrOrStderr(), format+"\n", args...)
			}
			report, err := benchPeers(cmd.Context(), cfg, rootfs)
			if err != nil {
				return err
			}
			if plot != "" {
				if err := os.WriteFile(plot, []byte(report.SVG()), 0o600); err != nil {
					return fmt.Errorf("--plot: %w", err)
				}
			}
			return printBench(cmd.OutOrStdout(), report, asJSON)
		},
	}
	f := cmd.Flags()
	f.StringVar(&rootfs, "rootfs", "", "folder with a root filesystem (required)")
	f.StringVar(&cfg.Python, "python", "", "Python that has microsandbox")
	f.StringVar(&cfg.Firecracker, "firecracker", "", "Firecracker's binary")
	f.IntVar(&cfg.Boots, "boots", cfg.Boots, "how many boots of each")
	f.IntVar(&cfg.Warm, "warm", cfg.Warm, "how many pings and programs in each source")
	f.IntVarP(&cfg.Forks, "count", "n", cfg.Forks, "how many forks of each")
	f.IntVar(&cfg.Lives, "lives", cfg.Lives, "how many forks of each while its source runs")
	f.Var(&dirty, "dirty", "what the source writes before each of these")
	f.IntVar(&cfg.VCPUs, "cpus", cfg.VCPUs, "processors of a microVM")
	f.Var(&memory, "memory", "RAM of a microVM")
	f.StringVar(&cfg.Program, "program", "/bin/true", "program of the root filesystem whose execution is measured, with its path")
	f.StringVar(&plot, "plot", "", "write a chart to this file (SVG)")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	if err := cmd.MarkFlagRequired("rootfs"); err != nil {
		panic(err) // the flag was defined above
	}
	return cmd
}

func benchPeers(ctx context.Context, cfg peers.Config, rootfs string) (_ peers.Report, err error) {
	root, cleanup, err := rootPath(ctx, rootfs, pick.MicroVM, os.Stderr)
	if err != nil {
		return peers.Report{}, err
	}
	defer func() { err = errors.Join(err, cleanup()) }()
	if cfg.RootImage, err = filepath.Abs(root); err != nil {
		return peers.Report{}, err
	}
	if root != rootfs {
		cfg.RootDir = rootfs
	}
	if cfg.Firecracker != "" {
		if cfg.Firecracker, err = filepath.Abs(cfg.Firecracker); err != nil { // it runs in another folder
			return peers.Report{}, err
		}
	}
	if cfg.Folder, err = os.MkdirTemp("", "agentrun-bench-"); err != nil {
		return peers.Report{}, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(cfg.Folder)) }()
	return peers.Run(ctx, cfg)
}
