package main

import (
	"context"
	"fmt"
	"time"

	"agentrun.dev/bench"
	"agentrun.dev/internal/engine/pick"
	"github.com/spf13/cobra"
)

// freeEngine is the value of --engine for an engine that is free of cost.
const freeEngine = "free"

func newNodeCommand() *cobra.Command {
	cfg := bench.DaemonConfig{
		Guest: bench.Guest{VCPUs: 1}, Records: 10000, RecordBytes: 4096, Stored: 500, Rounds: 3, For: 3 * time.Second, Others: 100,
		Clients: 32, SlowClients: 64, Added: 2 * time.Millisecond, Slow: 1000, Adoption: 100 * time.Millisecond, Silent: 10,
		Large: 455 << 20,
	}
	o := options{memory: 64 << 20}
	engine := freeEngine
	cmd := &cobra.Command{
		Use:   "node",
		Short: "The daemon's own work with many sandboxes: looking up, listing, claiming, ending, starting",
		Long: `Make --records sandboxes and measure what the daemon does by itself: sandboxes that are
looked up by name, in process and by the REST API, while --others ask for one that is
not there; pages of a list; the node's status, with --stored templates and checkpoints
beside them; sandboxes that are claimed and ended through gRPC, with
and without fsync and with slow commits; the start of a daemon with all of them; and
commits to a journal that was once large.

The engine is by default one that is free of cost: its sandboxes run nothing, and
what remains is the daemon. With --engine gvisor or microvm they are real, of
--rootfs: take few.`,
		Example: `  build/bench node
  build/bench node --engine gvisor --rootfs build/demo-rootfs --records 20 --clients 4 --slow-clients 8 --large 0`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.Records < 1 || cfg.Rounds < 1 || cfg.Clients < 1 || cfg.SlowClients < 1 || cfg.For <= 0 || cfg.Stored < 0 {
				return fmt.Errorf("--records %d, --rounds %d, --clients %d, --slow-clients %d, --for %v: at least 1 is needed",
					cfg.Records, cfg.Rounds, cfg.Clients, cfg.SlowClients, cfg.For)
			}
			if cfg.Free = engine == freeEngine; cfg.Free {
				o.rootfs = ""
			} else if o.rootfs == "" {
				return fmt.Errorf("--rootfs is missing: --engine %s makes sandboxes of it", engine)
			} else if err := cfg.Engine.Set(engine); err != nil {
				return err
			}
			return o.measure(cmd, &cfg.Guest, func(ctx context.Context) (report, error) { return bench.Daemon(ctx, cfg) })
		},
	}
	f := cmd.Flags()
	o.flags(f)
	o.rootFlags(f, &cfg.Guest, " for a real engine")
	f.StringVar(&engine, "engine", engine, fmt.Sprintf("%s (of cost), %s or %s", freeEngine, pick.GVisor, pick.MicroVM))
	f.IntVar(&cfg.Records, "records", cfg.Records, "how many sandboxes live")
	f.IntVar(&cfg.RecordBytes, "record-bytes", cfg.RecordBytes, "how many bytes of metadata each has")
	f.IntVar(&cfg.Stored, "stored", cfg.Stored, "how many templates and checkpoints there are beside them, each, when the node's status is measured (engine free of cost)")
	f.IntVar(&cfg.Rounds, "rounds", cfg.Rounds, "how often the measurements take turns")
	f.DurationVar(&cfg.For, "for", cfg.For, "how long each of them takes")
	f.IntVar(&cfg.Others, "others", cfg.Others, "how many ask for what is not there")
	f.IntVar(&cfg.Clients, "clients", cfg.Clients, "how many claim and end sandboxes at once")
	f.IntVar(&cfg.SlowClients, "slow-clients", cfg.SlowClients, "how many do where commits are slow")
	f.DurationVar(&cfg.Added, "added", cfg.Added, "what is added to each of those commits")
	f.IntVar(&cfg.Slow, "slow", cfg.Slow, "how many sandboxes take --adoption to be taken over at the start (engine free of cost)")
	f.DurationVar(&cfg.Adoption, "adoption", cfg.Adoption, "how long that is")
	f.IntVar(&cfg.Silent, "silent", cfg.Silent, "how many never answer then (engine free of cost)")
	f.Int64Var(&cfg.Large, "large", cfg.Large, "how many bytes the journal once had whose commits are measured; 0 leaves it out")
	return cmd
}
