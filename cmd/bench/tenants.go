package main

import (
	"context"
	"fmt"

	"agentrun.dev/bench"
	"agentrun.dev/cmd/internal/cli"
	"github.com/spf13/cobra"
)

func newTenantsCommand() *cobra.Command {
	cfg := bench.TenantsConfig{Guest: bench.Guest{VCPUs: 1}, Rounds: 100, Busy: 4, Hostile: 2}
	o := options{memory: 128 << 20}
	program, storage, reserve := "/bin/true", cli.ByteSize(512<<20), cli.ByteSize(256<<20)
	cmd := &cobra.Command{
		Use:   "tenants --rootfs DIR",
		Short: "A quiet tenant beside a busy one, and beside a hostile one",
		Long: `Serve a node's REST API to tenants with a namespace and a key each, and measure how long
the claims and execs of one take that does one after the other: beside a tenant that is
merely busy, and then beside one that floods the node with look-ups, builds, forks,
tokens of terminals, logs, checkpoints and hibernations, up to its quota and beyond.

Then the same with the state folder on a file system in memory of its own (which takes root),
without a quota of disk: as soon as the hostile tenant begins there is no room but a part of
--reserve, so that nothing that it wants stored is stored. --reserve 0 leaves that out.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.Rounds < 1 || cfg.Busy < 1 || cfg.Hostile < 1 {
				return fmt.Errorf("--rounds %d, --busy %d, --hostile %d: at least 1 is needed", cfg.Rounds, cfg.Busy, cfg.Hostile)
			}
			cfg.Argv, cfg.Storage = []string{program}, uint64(storage)
			cfg.Reserve = uint64(reserve)
			return o.measure(cmd, &cfg.Guest, func(ctx context.Context) (report, error) { return bench.Tenants(ctx, cfg) })
		},
	}
	f := cmd.Flags()
	o.flags(f)
	o.rootFlags(f, &cfg.Guest, "")
	f.IntVarP(&cfg.Rounds, "rounds", "n", cfg.Rounds, "how many sandboxes the quiet tenant claims beside each")
	f.IntVar(&cfg.Busy, "busy", cfg.Busy, "how many sandboxes the busy tenant uses at once")
	f.IntVar(&cfg.Hostile, "hostile", cfg.Hostile, "how many workers each flood of the hostile tenant has")
	f.Var(&storage, "storage", "the hostile tenant's quota of disk")
	f.Var(&reserve, "reserve", "how much of the full disk is kept free of what tenants store")
	f.StringVar(&program, "program", program, "program of the root filesystem that the execs run")
	engineFlags(f, &cfg.Guest)
	require(cmd, "rootfs")
	return cmd
}
