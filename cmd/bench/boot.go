package main

import (
	"context"

	"agentrun.dev/bench"
	"agentrun.dev/cmd/internal/cli"
	"github.com/spf13/cobra"
)

func newBootCommand() *cobra.Command {
	cfg := bench.BootConfig{Guest: bench.Guest{VCPUs: 1}, Boots: 10, Pings: 500, Execs: 200}
	o := options{memory: 256 << 20}
	cmd := &cobra.Command{
		Use:   "boot --rootfs DIR",
		Short: "Boot to first answer, warm ping and warm exec of a microVM",
		Long: `Boot microVMs and measure, on this machine and beside the floor of the same run:
the time from the call to the first answer of the guest's agent, the round trip
of a ping, and of a process from its start to its exit status.

The floor is the least that KVM takes for any machine: KVM_CREATE_VM, split
irqchip, a private mapping of 256 MiB, one slot, one vCPU, its registers, and a
run to the first port write.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.measure(cmd, &cfg.Guest, func(ctx context.Context) (report, error) { return bench.Boot(ctx, cfg) })
		},
	}
	f := cmd.Flags()
	o.flags(f)
	o.rootFlags(f, &cfg.Guest, " that has a program true")
	f.IntVar(&cfg.Boots, "boots", cfg.Boots, "how many microVMs to boot")
	f.IntVar(&cfg.Pings, "pings", cfg.Pings, "how many pings to measure")
	f.IntVar(&cfg.Execs, "execs", cfg.Execs, "how many processes to run")
	f.StringVar(&cfg.Program, "program", "true", "program of the root filesystem whose execution is measured")
	cli.PolicyFlags(f, &cfg.Jail)
	require(cmd, "rootfs")
	return cmd
}
