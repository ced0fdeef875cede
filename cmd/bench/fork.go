package main

import (
	"context"
	"errors"
	"fmt"

	"agentrun.dev/bench"
	"agentrun.dev/cmd/internal/cli"
	"agentrun.dev/internal/engine/pick"
	"github.com/spf13/cobra"
)

func newForkCommand() *cobra.Command {
	cfg := bench.ForkConfig{Guest: bench.Guest{VCPUs: 1}, Count: 100, Parallel: 1}
	o := options{memory: 256 << 20}
	var guest string
	cmd := &cobra.Command{
		Use:   "fork (--rootfs DIR | --guest test)",
		Short: "Forks: to the first instruction, the first answer and the first program",
		Long: `Boot microVMs and measure, on this machine and beside the floor of the same run:
the time from the call to the first answer of the guest's agent, the round trip
of a ping, and of a process from its start to its exit status.

The floor is the least that KVM takes for any machine: KVM_CREATE_VM, split
irqchip, a private mapping of 256 MiB, one slot, one vCPU, its registers, and a
run to the first port write.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.Engine, _ = pick.Choose(cfg.Engine)
			if err := checkForkFlags(guest, cfg); err != nil {
				return err
			}
			if err := o.checkGuest(guest); err != nil {
				return err
			}
			return o.measure(cmd, &cfg.Guest, func(ctx context.Context) (report, error) {
				if guest == bench.GuestTest {
					return bench.ForkBare(ctx, cfg)
				}
				return bench.Fork(ctx, cfg)
			})
		},
	}
	f := cmd.Flags()
	o.flags(f)
	o.rootFlags(f, &cfg.Guest, "")
	guestFlag(f, &guest)
	cli.EngineFlag(f, &cfg.Engine)
	f.StringVar(&cfg.Warm, "warm", "", "shell script that warms the guest up before it is frozen; what it leaves running runs in every fork")
	f.IntVar(&cfg.Precreate, "precreate", 0, "gVisor: so many sandboxes wait, made and with the state of their kernels read, but not restored, before each fork")
	f.IntVarP(&cfg.Count, "count", "n", cfg.Count, "how many forks")
	f.IntSliceVar(&cfg.Walls, "wall", nil, "numbers of forks to make against the wall clock")
	f.IntVar(&cfg.Parallel, "parallel", cfg.Parallel, "how many of these to make at once")
	f.IntVar(&cfg.Shells, "shells", 0, "how many shells wait for forks that are measured apart (Linux)")
	f.StringVar(&cfg.Program, "program", "true", "program of the root filesystem whose execution is measured")
	cli.PolicyFlags(f, &cfg.Jail)
	return cmd
}

func checkForkFlags(guest string, cfg bench.ForkConfig) error {
	switch {
	case cfg.Precreate < 0 || cfg.Precreate > 100:
		return fmt.Errorf("--precreate %d: 0 to 100 are possible", cfg.Precreate)
	case cfg.Count < 1:
		return fmt.Errorf("--count %d: at least 1 is needed", cfg.Count)
	case cfg.Parallel < 1:
		return fmt.Errorf("--parallel %d: at least 1 is needed", cfg.Parallel)
	case cfg.Shells < 0:
		return fmt.Errorf("--shells %d: 0 or more", cfg.Shells)
	case cfg.Shells > 0 && cfg.Engine == pick.GVisor:
		return errors.New("--shells: gVisor has none; --precreate makes its sandboxes ahead")
	case cfg.Shells > 0 && guest == bench.GuestTest:
		return errors.New("--shells: the bare guest is always measured from shells, too")
	}
	for _, n := range cfg.Walls {
		if n < 1 {
			return fmt.Errorf("--wall %d: at least 1 is needed", n)
		}
	}
	return nil
}
