package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
)

// BootConfig configures Boot.
type BootConfig struct {
	Guest
	// Program is a program of the root filesystem that does nothing.
	Program string
	// Boots, Pings and Execs are how often each is measured.
	Boots, Pings, Execs int
}

// BootReport is the result of Boot.
type BootReport struct {
	Memory uint64 `json:"memory_bytes"`
	VCPUs  int    `json:"vcpus"`
	// Floor is the least time that this host's KVM takes for any machine.
	Floor Summary `json:"floor"`
	// Boot is the time from the call to the first answer of the guest's agent. It
	// includes the start of the vmm process and the packing of the agent.
	Boot Summary `json:"boot_to_first_answer"`
	// Ping and Exec are times of round trips to a running guest: to its agent, and
	// for a process from its start to its exit status.
	Ping Summary `json:"warm_ping"`
	Exec Summary `json:"warm_exec"`
	// Noisy says that the floor varied too much for the numbers to be meaningful.
	Noisy bool `json:"noisy"`
}

// Boot measures boot to first answer, warm ping and warm exec. It samples the floor
// in between.
func Boot(ctx context.Context, cfg BootConfig) (_ BootReport, err error) {
	report := BootReport{Memory: cfg.Memory, VCPUs: cfg.VCPUs}
	floor, err := NewFloor()
	if err != nil {
		return report, err
	}
	defer func() { _ = floor.Close() }()
	root, err := os.Open(cfg.Root)
	if err != nil {
		return report, fmt.Errorf("bench boot: %w", err)
	}
	defer func() { _ = root.Close() }()

	dir, err := os.MkdirTemp("/dev/shm", "agentrun-bench-")
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	e, err := microvm.New(microvm.Config{Resident: filepath.Join(dir, "resident"), Scratch: filepath.Join(dir, "scratch"), Jail: cfg.Jail})
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()

	var floors, boots, pings, execs []time.Duration
	sampleFloor := func(n int) error {
		for range n {
			d, err := floor.Sample()
			if err != nil {
				return err
			}
			floors = append(floors, d)
		}
		return nil
	}
	if err := sampleFloor(5); err != nil { // the first samples warm up caches
		return report, err
	}
	floors = floors[:0]
	for range cfg.Boots {
		if err := sampleFloor(5); err != nil {
			return report, err
		}
		start := time.Now()
		sb, err := e.Boot(ctx, engine.Spec{Root: root, Memory: cfg.Memory, VCPUs: cfg.VCPUs})
		if err != nil {
			return report, err
		}
		agent := sb.Agent()
		err = agent.Ping(ctx)
		boots = append(boots, time.Since(start))
		if err == nil {
			pings, err = repeat(pings, cfg.Pings/cfg.Boots, func() error { return agent.Ping(ctx) })
		}
		if err == nil {
			execs, err = repeat(execs, cfg.Execs/cfg.Boots, func() error { return execProgram(ctx, agent, cfg.Program) })
		}
		if err = errors.Join(err, sb.Close()); err != nil {
			return report, err
		}
	}
	report.Floor, report.Boot = Summarize(floors), Summarize(boots)
	report.Ping, report.Exec = Summarize(pings), Summarize(execs)
	report.Noisy = report.Floor.Noisy()
	return report, nil
}

// warmUps are repetitions that do not count, in which the guest pages its programs
// in.
const warmUps = 3

func repeat(sample []time.Duration, n int, do func() error) ([]time.Duration, error) {
	for i := range n + warmUps {
		start := time.Now()
		if err := do(); err != nil {
			return sample, err
		}
		if i >= warmUps {
			sample = append(sample, time.Since(start))
		}
	}
	return sample, nil
}

// Print writes the report as a table.
func (r BootReport) Print(w io.Writer) error {
	fmt.Fprintf(w, "microVM of %d MiB, %d vCPU; milliseconds\n", r.Memory>>20, r.VCPUs)
	err := printTable(w, r.Floor, []row{
		{"floor", r.Floor}, {"boot to first answer", r.Boot}, {"warm ping", r.Ping}, {"warm exec", r.Exec},
	})
	if err == nil && r.Noisy {
		fmt.Fprintln(w, NoisyWarning)
	}
	return err
}
