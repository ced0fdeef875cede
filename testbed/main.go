// Command testbed runs programs on a real /dev/kvm on any host: inside a
// QEMU VM whose emulated AMD-V works as hardware does, with the host's
// own files at the same paths. It is the runner for go test -exec.
//
// The same binary is the init of that VM (internal/inside).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"agentrun.dev/testbed/internal/inside"
	"agentrun.dev/testbed/internal/qemu"
)

const usage = `usage: testbed COMMAND

  start [--memory 8G] [--cpus 1] [--kernel DIR]
                                  start the machine unless it is up
  stop                            end it
  status                          say whether it is up
  exec [--] CMD [ARGS…]           run a command inside, in this folder
  shell [CMD ARGS…]               the same on a terminal (default: a shell)
  check                           print "hardware" when this host's own KVM is
                                  usable, else "testbed"
`

// exitError carries a command's exit code through run.
type exitError int

func (e exitError) Error() string { return "exit status " + strconv.Itoa(int(e)) }

func main() {
	inside.Main()
	err := run(context.Background(), os.Args[1:])
	var exit exitError
	switch {
	case err == nil:
	case errors.As(err, &exit):
		os.Exit(int(exit))
	default:
		fmt.Fprintf(os.Stderr, "testbed: %v\n", err)
		// 125 as in env(1): a failure of the runner, not of the program that it runs.
		os.Exit(125)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, usage)
		return exitError(2)
	}
	name, args := args[0], args[1:]
	switch name {
	case "check":
		return check()
	case "help", "-h", "--help":
		fmt.Print(usage)
		return nil
	}
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	m, err := qemu.Open(dir)
	if err != nil {
		return err
	}
	switch name {
	case "start":
		return start(ctx, m, args)
	case "stop":
		if err := m.Stop(); err != nil && !errors.Is(err, qemu.ErrNotRunning) {
			return err
		}
		return nil
	case "status":
		return status(m)
	case "exec":
		if len(args) > 0 && args[0] == "--" {
			args = args[1:]
		}
		if len(args) == 0 {
			return errors.New("exec: no command (testbed exec CMD ARGS…)")
		}
		return execute(ctx, m, command{argv: args, workdir: dir})
	case "shell":
		if len(args) == 0 {
			args = []string{"/bin/bash"}
		}
		return execute(ctx, m, command{argv: args, workdir: dir, tty: true})
	}
	return fmt.Errorf("unknown command %q\n%s", name, usage)
}

func start(ctx context.Context, m *qemu.VM, args []string) error {
	flags := flag.NewFlagSet("start", flag.ContinueOnError)
	memory := flags.String("memory", "", "memory of the machine, for example 8G or 4096M (default: 8G, or half of the host's if less)")
	cpus := flags.Int("cpus", 0, "processors of the machine (default 1)")
	kernel := flags.String("kernel", "", "folder with boot and lib/modules; / is what the host has installed (default: what testbed/kernel/fetch.sh has fetched, or else /)")
	if err := flags.Parse(args); err != nil {
		return exitError(2)
	}
	cfg := qemu.Config{CPUs: *cpus, Kernel: *kernel}
	if *memory != "" {
		n, err := parseMiB(*memory)
		if err != nil {
			return fmt.Errorf("--memory: %w", err)
		}
		cfg.MemoryMiB = n
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, unix.SIGTERM)
	defer stop()
	started, err := m.Start(ctx, cfg)
	if err != nil {
		return err
	}
	if !started {
		fmt.Fprintln(os.Stderr, "testbed: already up")
	}
	return nil
}

func parseMiB(s string) (int, error) {
	unit := 1
	number := strings.TrimSuffix(s, "M")
	if n, ok := strings.CutSuffix(s, "G"); ok {
		number, unit = n, 1024
	}
	n, err := strconv.Atoi(number)
	if err != nil || n < 1 || n > 1<<20 || n*unit < 512 {
		return 0, fmt.Errorf("%q is not an amount like 8G or 4096M, of at least 512M", s)
	}
	return n * unit, nil
}

func status(m *qemu.VM) error {
	pid, err := m.PID()
	if errors.Is(err, qemu.ErrNotRunning) {
		fmt.Println("stopped")
		return exitError(3)
	} else if err != nil {
		return err
	}
	fmt.Printf("running pid=%d state=%s results=%s\n", pid, m.State(), m.Results())
	return nil
}
