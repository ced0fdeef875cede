package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/bench"
	"agentrun.dev/internal/engine/pick"
	"github.com/spf13/cobra"
)

func newBenchCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "bench", Short: "Measure AgentRun on this machine, beside the floor that KVM or runsc sets"}
	cmd.AddCommand(newBenchBootCommand(), newBenchForkCommand(), newBenchLiveCommand(), newBenchClaimCommand(), newBenchWakeCommand(), newBenchFanoutCommand(), newBenchExecCommand(), newBenchPeersCommand())
	return cmd
}

// newFloorCommand is this program started again by package bench.
func newFloorCommand() *cobra.Command {
	return &cobra.Command{
		Use: bench.FloorCommand, Args: cobra.NoArgs, Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return bench.ServeFloor(cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
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
			root, cleanup, err := rootPath(cmd.Context(), rootfs, pick.MicroVM, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, cleanup()) }()
			cfg.Root, cfg.Memory = root, uint64(memory)
			report, err := bench.Boot(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			return printBench(cmd.OutOrStdout(), report, asJSON)
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
	policyFlags(f, &cfg.Jail)
	f.BoolVar(&asJSON, "json", false, "print JSON")
	if err := cmd.MarkFlagRequired("rootfs"); err != nil {
		panic(err) // the flag was defined above
	}
	return cmd
}

// benchReport is what every benchmark returns.
type benchReport interface{ Print(io.Writer) error }

func printBench(w io.Writer, r benchReport, asJSON bool) error {
	if !asJSON {
		return r.Print(w)
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

func newBenchForkCommand() *cobra.Command {
	cfg := bench.ForkConfig{VCPUs: 1, Count: 100, Parallel: 1}
	memory := byteSize(256 << 20)
	var rootfs, guest string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "fork (--rootfs DIR | --guest test)",
		Short: "Forks: to the first instruction, the first answer and the first program",
		Long: `Boot a microVM, freeze it, fork it again and again and measure, beside the floor
of the same run: when the state is restored, when the agent has answered (with an
identity of its own), when a program has ended, a warm ping and a warm program, and
the memory that a fork costs, after its first answer and after a program: pages of
its own in the guest's RAM, the private memory and PSS of the process apart from
them, and by how much the kernel's memory has grown. All forks stay alive to the
end.

--wall 1,100,500 makes so many forks against the wall clock, each time anew; one
after the other, as agentrun fork does, or --parallel N at once.

--shells N makes as many forks again, in turns with the others, into N shells that
wait: jailed processes with VM, vCPU and memory, the state not yet loaded. They are
reported apart.

--guest test measures the host's side alone, in one process, with a bare guest
that runs on any KVM: to the first guest instruction, and the same from shells
made ahead (VM, vCPU and memory there, state not yet loaded).

On gVisor the floor is a plain runsc restore, by its command line, of a shell that
answers.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			cfg.Engine, _ = pick.Choose(cfg.Engine)
			if err := checkForkFlags(guest, cfg); err != nil {
				return err
			}
			cfg.Memory = uint64(memory)
			var r bench.ForkReport
			switch {
			case guest == bench.GuestTest:
				r, err = bench.ForkBare(cmd.Context(), cfg)
			case guest != bench.GuestLinux:
				return fmt.Errorf("--guest %q: linux or test", guest)
			case rootfs == "":
				return errors.New("--rootfs is missing: a folder with a root filesystem, or an EROFS image of one")
			default:
				r, err = benchForkLinux(cmd.Context(), cfg, rootfs, cmd.ErrOrStderr())
			}
			if err != nil {
				return err
			}
			return printBench(cmd.OutOrStdout(), r, asJSON)
		},
	}
	f := cmd.Flags()
	f.StringVar(&rootfs, "rootfs", "", "folder with a root filesystem, or an EROFS image of one")
	f.StringVar(&guest, "guest", bench.GuestLinux, "linux, or test for the bare guest")
	engineFlag(f, &cfg.Engine)
	f.StringVar(&cfg.Warm, "warm", "", "shell script that warms the guest up before it is frozen; what it leaves running runs in every fork")
	f.IntVar(&cfg.Precreate, "precreate", 0, "gVisor: so many sandboxes wait, made and with the state of their kernels read, but not restored, before each fork")
	f.IntVarP(&cfg.Count, "count", "n", cfg.Count, "how many forks")
	f.IntSliceVar(&cfg.Walls, "wall", nil, "numbers of forks to make against the wall clock")
	f.IntVar(&cfg.Parallel, "parallel", cfg.Parallel, "how many of these to make at once")
	f.IntVar(&cfg.Shells, "shells", 0, "how many shells wait for forks that are measured apart (Linux)")
	f.IntVar(&cfg.VCPUs, "cpus", cfg.VCPUs, "processors of the microVM")
	f.Var(&memory, "memory", "RAM of the microVM")
	f.StringVar(&cfg.Program, "program", "true", "program of the root filesystem whose execution is measured")
	policyFlags(f, &cfg.Jail)
	f.BoolVar(&asJSON, "json", false, "print JSON")
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

func benchForkLinux(ctx context.Context, cfg bench.ForkConfig, rootfs string, stderr io.Writer) (_ bench.ForkReport, err error) {
	root, cleanup, err := rootPath(ctx, rootfs, cfg.Engine, stderr)
	if err != nil {
		return bench.ForkReport{}, err
	}
	defer func() { err = errors.Join(err, cleanup()) }()
	cfg.Root = root
	if cfg.Folder, err = os.MkdirTemp("", "agentrun-bench-"); err != nil {
		return bench.ForkReport{}, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(cfg.Folder)) }()
	return bench.Fork(ctx, cfg)
}
