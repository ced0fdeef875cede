package main

import (
	"context"
	"errors"
	"fmt"

	"agentrun.dev/bench"
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
		Long: `Boot a microVM, freeze it, fork it again and again and measure, beside the floor
of the same run: when the state is restored, when the agent has answered (with an
identity of its own), when a program has ended, a warm ping and a warm program, and
the memory that a fork costs, after its first answer and after a program: pages of
its own in the guest's RAM, the private memory and PSS of the process apart from
them, and by how much the kernel's memory has grown. All forks stay alive to the
end.

--wall 1,100,500 makes so many forks against the wall clock, each time anew; one
after the other, as agentrun fork does, or --parallel N at once.

--shells N makes as many forks again, in turns with the others, into N spares that
wait: jailed processes with VM, vCPU and memory, the state not yet loaded. They are
reported apart.

--interface makes as many forks again, in turns with the others, of the same guest
with a network interface, whose other end nobody uses. They are reported apart.

--guest test measures the host's side alone, in one process, with a bare guest
that runs on any KVM: to the first guest instruction, and the same from spares
made ahead (VM, vCPU and memory there, state not yet loaded).

On gVisor the floor is a plain runsc restore, by its command line, of a shell that
answers.`,
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
	f.StringVar(&cfg.Warm, "warm", "", "shell script that warms the guest up before it is frozen; what it leaves running runs in every fork")
	f.IntVar(&cfg.Precreate, "precreate", 0, "gVisor: so many sandboxes wait, made and with the state of their kernels read, but not restored, before each fork")
	f.IntVarP(&cfg.Count, "count", "n", cfg.Count, "how many forks")
	f.IntSliceVar(&cfg.Walls, "wall", nil, "numbers of forks to make against the wall clock")
	f.IntVar(&cfg.Parallel, "parallel", cfg.Parallel, "how many of these to make at once")
	f.IntVar(&cfg.Spares, "shells", 0, "how many spares wait for forks that are measured apart (Linux)")
	f.BoolVar(&cfg.Interface, "interface", false, "make as many forks again of a guest with a network interface, measured apart (Linux)")
	f.StringVar(&cfg.Program, "program", "true", "program of the root filesystem whose execution is measured")
	engineFlags(f, &cfg.Guest)
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
	case cfg.Spares < 0:
		return fmt.Errorf("--shells %d: 0 or more", cfg.Spares)
	case cfg.Spares > 0 && cfg.Engine == pick.GVisor:
		return errors.New("--shells: gVisor has none; --precreate makes its sandboxes ahead")
	case cfg.Spares > 0 && guest == bench.GuestTest:
		return errors.New("--shells: the bare guest is always measured from spares, too")
	case cfg.Interface && guest == bench.GuestTest:
		return errors.New("--interface: the bare guest has none")
	}
	for _, n := range cfg.Walls {
		if n < 1 {
			return fmt.Errorf("--wall %d: at least 1 is needed", n)
		}
	}
	return nil
}
