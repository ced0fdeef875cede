package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"agentrun.dev/bench"
	"github.com/spf13/cobra"
)

func newNetworkCommand() *cobra.Command {
	cfg := bench.NetworkConfig{
		Guest: bench.Guest{VCPUs: 1}, Connections: []int{1, 100}, Rounds: 5, For: 2 * time.Second, Count: 1000, Wires: 500,
	}
	o := options{memory: 256 << 20}
	var inside bool
	cmd := &cobra.Command{
		Use:   "network --rootfs DIR",
		Short: "TCP from a sandbox through netd, beside plain loopback",
		Long: `Boot a sandbox with an interface, connect it to a netd, both in their jails, and have
a program in it send to a server of this machine, and receive from it, in turns with
the same program outside: bytes per second and processor time per byte, up and down,
the round trip of a byte, and the time of opening a connection. Then attach idle wires
to another netd and measure its memory.

All of it happens in a network namespace of its own, and needs root.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkNetworkFlags(cfg); err != nil {
				return err
			}
			if !inside {
				return bench.InOwnNetwork(cmd.Context(), append(os.Args[1:], "--"+insideFlag), cmd.OutOrStdout(), cmd.ErrOrStderr())
			}
			return o.measure(cmd, &cfg.Guest, func(ctx context.Context) (report, error) { return bench.Network(ctx, cfg) })
		},
	}
	f := cmd.Flags()
	o.flags(f)
	o.rootFlags(f, &cfg.Guest, "")
	f.IntSliceVar(&cfg.Connections, "connections", cfg.Connections, "how many connections at once, one measurement for each number")
	f.IntVar(&cfg.Rounds, "rounds", cfg.Rounds, "how often each is measured")
	f.DurationVar(&cfg.For, "for", cfg.For, "for how long, each time")
	f.IntVarP(&cfg.Count, "count", "n", cfg.Count, "how many round trips, and how many connections one after the other")
	f.IntVar(&cfg.Wires, "wires", cfg.Wires, "how many idle wires to attach in the end; 0 attaches none")
	f.BoolVar(&inside, insideFlag, false, "this process is in a network namespace of its own")
	if err := f.MarkHidden(insideFlag); err != nil {
		panic(err) // the flag was just defined
	}
	engineFlags(f, &cfg.Guest)
	require(cmd, "rootfs")
	return cmd
}

// insideFlag is passed to the program when it starts itself again.
const insideFlag = "in-own-network"

func checkNetworkFlags(cfg bench.NetworkConfig) error {
	if cfg.Rounds < 1 || cfg.Count < 1 || cfg.Wires < 0 {
		return fmt.Errorf("--rounds %d, --count %d: at least 1 is needed; --wires %d: 0 or more", cfg.Rounds, cfg.Count, cfg.Wires)
	}
	if cfg.For <= 0 {
		return fmt.Errorf("--for %v: it must be longer than that", cfg.For)
	}
	for _, n := range cfg.Connections {
		if n < 1 {
			return fmt.Errorf("--connections %d: at least 1 is needed", n)
		}
	}
	return nil
}

// newLoadCommand is this program started again by package bench, as a client.
func newLoadCommand() *cobra.Command {
	return &cobra.Command{
		Use: bench.LoadCommand, Args: cobra.ExactArgs(1), Hidden: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			return bench.ServeLoad(cmd.Context(), args[0], cmd.OutOrStdout())
		},
	}
}
