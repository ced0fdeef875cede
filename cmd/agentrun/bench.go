package main

import (
	"encoding/json"
	"errors"

	"agentrun.dev/bench"
	"github.com/spf13/cobra"
)

func newBenchCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "bench", Short: "Measure AgentRun on this machine, beside the floor that KVM sets"}
	cmd.AddCommand(newBenchBootCommand())
	return cmd
}

func newBenchBootCommand() *cobra.Command {
	cfg := bench.BootConfig{VCPUs: 1, Boots: 10, Pings: 500, Execs: 200}
	memory := byteSize(256 << 20)
	var rootfs string
	var asJSON bool
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
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			root, cleanup, err := rootPath(cmd.Context(), rootfs)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, cleanup()) }()
			cfg.Root, cfg.Memory = root, uint64(memory)
			report, err := bench.Boot(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			if asJSON {
				e := json.NewEncoder(cmd.OutOrStdout())
				e.SetIndent("", "  ")
				return e.Encode(report)
			}
			return report.Print(cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&rootfs, "rootfs", "", "folder with a root filesystem that has a program true, or an EROFS image of one (required)")
	f.IntVar(&cfg.Boots, "boots", cfg.Boots, "how many microVMs to boot")
	f.IntVar(&cfg.Pings, "pings", cfg.Pings, "how many pings to measure")
	f.IntVar(&cfg.Execs, "execs", cfg.Execs, "how many processes to run")
	f.IntVar(&cfg.VCPUs, "cpus", cfg.VCPUs, "processors of the microVM")
	f.Var(&memory, "memory", "RAM of the microVM")
	f.StringVar(&cfg.Program, "program", "true", "program of the root filesystem whose execution is measured")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	if err := cmd.MarkFlagRequired("rootfs"); err != nil {
		panic(err) // the flag was defined above
	}
	return cmd
}
