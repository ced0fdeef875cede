package main

import (
	"errors"
	"os"

	"agentrun.dev/bench"
	"agentrun.dev/internal/engine/pick"
	"github.com/spf13/cobra"
)

func newBenchWakeCommand() *cobra.Command {
	cfg := bench.WakeConfig{VCPUs: 1, Count: 10, Fill: 96}
	memory := byteSize(256 << 20)
	var rootfs string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "wake --rootfs DIR",
		Short: "Sandboxes that hibernate and wake, beside a cold fork and reading their layers",
		Long: `Fork a sandbox, fill its memory, write it to disk and wake it, with nothing of it in
memory or in the host's caches. Beside that, in turns: reading and hashing the layers
that the sandbox was written to, and the same fork with these in memory.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			cfg.Engine, _ = pick.Choose(cfg.Engine)
			root, cleanup, err := rootPath(cmd.Context(), rootfs, cfg.Engine, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, cleanup()) }()
			cfg.Root, cfg.Memory = root, uint64(memory)
			if cfg.Folder, err = os.MkdirTemp("", "agentrun-bench-"); err != nil {
				return err
			}
			defer func() { err = errors.Join(err, os.RemoveAll(cfg.Folder)) }()
			report, err := bench.Wake(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			return printBench(cmd.OutOrStdout(), report, asJSON)
		},
	}
	f := cmd.Flags()
	f.StringVar(&rootfs, "rootfs", "", "folder with a root filesystem, or an EROFS image of one (required)")
	f.IntVarP(&cfg.Count, "count", "n", cfg.Count, "how many sandboxes, one after the other")
	f.IntVar(&cfg.Fill, "fill", cfg.Fill, "how many MiB of each are filled")
	f.IntVar(&cfg.VCPUs, "cpus", cfg.VCPUs, "processors of a sandbox")
	f.Var(&memory, "memory", "RAM of a sandbox")
	engineFlag(f, &cfg.Engine)
	f.BoolVar(&asJSON, "json", false, "print JSON")
	policyFlags(f, &cfg.Jail)
	if err := cmd.MarkFlagRequired("rootfs"); err != nil {
		panic(err) // the flag was defined above
	}
	return cmd
}
