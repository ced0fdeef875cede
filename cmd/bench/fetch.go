package main

import (
	"context"
	"fmt"

	"agentrun.dev/bench"
	"agentrun.dev/cmd/internal/cli"
	"github.com/spf13/cobra"
)

func newFetchCommand() *cobra.Command {
	cfg := bench.FetchConfig{Random: 50, Rounds: 5}
	size := cli.ByteSize(512 << 20)
	var o options
	cmd := &cobra.Command{
		Use:   "fetch",
		Short: "A snapshot that a node fetches from another, beside cp and the bare link",
		Long: `Fetch a snapshot over gRPC with mutual TLS, from one node and from two, as daemons do
it, until it is on disk. Beside that, in turns: cp of the same bytes, TLS over loopback
that nobody listens to, and reading and hashing them once. All ends are on this machine.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if size < 1<<20 || size%(1<<20) != 0 || cfg.Random < 0 || cfg.Random > 100 || cfg.Rounds < 1 {
				return fmt.Errorf("--size is in whole MiB, --random 0 to 100, --rounds 1 or more")
			}
			cfg.Size = uint64(size)
			var guest bench.Guest // for its folder
			return o.measure(cmd, &guest, func(ctx context.Context) (report, error) {
				cfg.Folder = guest.Folder
				return bench.Fetch(ctx, cfg)
			})
		},
	}
	f := cmd.Flags()
	f.BoolVar(&o.json, "json", false, "print JSON")
	f.Var(&size, "size", "size of the snapshot")
	f.IntVar(&cfg.Random, "random", cfg.Random, "how much of each page does not compress, in percent")
	f.IntVar(&cfg.Rounds, "rounds", cfg.Rounds, "how often each is measured")
	return cmd
}
