package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/guestrpc"
)

// Guests that forks are measured with.
const (
	GuestLinux = "linux"
	GuestTest  = "test"
)

// ForkConfig says what Fork and ForkBare measure.
type ForkConfig struct {
	// Root is an EROFS image, Program a program in it that does nothing.
	Root, Program string
	Memory        uint64
	VCPUs         int
	// Count is how many forks are made one after the other; all stay alive.
	Count int
	// Folder is for the snapshot and the forks' disks.
	Folder string
	Jail   microvm.JailPolicy
}

// ForkReport is what they found. Times are from the call.
type ForkReport struct {
	Guest  string  `json:"guest"`
	Memory uint64  `json:"memory_bytes"`
	VCPUs  int     `json:"vcpus"`
	Count  int     `json:"count"`
	Floor  Summary `json:"floor"`
	// Restored: the machine's state is loaded. FirstInstruction: the guest
	// was seen to run. FromShell: the same, with VM, vCPU and memory made
	// ahead. Only the bare guest shows these two.
	Restored         Summary `json:"restored"`
	FirstInstruction Summary `json:"first_instruction"`
	FromShell        Summary `json:"first_instruction_from_shell"`
	// FirstAnswer is that of the agent, the fork's new identity included, and
	// FirstExec the exit status of a program; both only for Linux.
	FirstAnswer Summary `json:"first_answer"`
	FirstExec   Summary `json:"first_exec"`
	// Ping and Exec are measured in forks that were used before.
	Ping Summary `json:"warm_ping"`
	Exec Summary `json:"warm_exec"`
	// Own is the private memory of a fork's process, in bytes, the median
	// after the first answer and after the first program.
	OwnAfterAnswer uint64 `json:"own_after_answer_bytes"`
	OwnAfterExec   uint64 `json:"own_after_exec_bytes"`
	// All is the sum of the forks' times to their first answers.
	All   float64 `json:"all_ms"`
	Alive int     `json:"alive"`
	Noisy bool    `json:"noisy"`
}

// Fork measures forks of a Linux guest: a new process each, identity included.
func Fork(ctx context.Context, cfg ForkConfig) (_ ForkReport, err error) {
	report := ForkReport{Guest: GuestLinux, Memory: cfg.Memory, VCPUs: cfg.VCPUs, Count: cfg.Count}
	resident, err := os.MkdirTemp("/dev/shm", "agentrun-bench-")
	if err != nil {
		return report, fmt.Errorf("bench fork: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(resident)) }()
	e, err := microvm.New(microvm.Config{Resident: resident, Scratch: filepath.Join(cfg.Folder, "scratch"), Jail: cfg.Jail})
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	root, err := os.Open(cfg.Root)
	if err != nil {
		return report, fmt.Errorf("bench fork: %w", err)
	}
	defer func() { _ = root.Close() }() // only read
	source, err := e.Boot(ctx, engine.Spec{Root: root, Memory: cfg.Memory, VCPUs: cfg.VCPUs})
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, source.Close()) }()
	if _, err := repeat(nil, 0, func() error { return execProgram(ctx, source.Agent(), cfg.Program) }); err != nil {
		return report, err
	}
	snap, err := source.Snapshot(ctx, filepath.Join(cfg.Folder, "snapshot"))
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, snap.Close()) }()
	if err := source.Pause(ctx); err != nil { // it must not disturb its children
		return report, err
	}
	floor, err := NewFloor()
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, floor.Close()) }()

	var forks []engine.Sandbox
	defer func() {
		for _, sb := range forks {
			err = errors.Join(err, sb.Close())
		}
	}()
	var floors, restored, answers, execs, pings, warm []time.Duration
	var own, used []uint64
	for i := range cfg.Count + warmUps {
		d, err := floor.Sample()
		if err != nil {
			return report, err
		}
		start := time.Now()
		sb, err := e.Fork(ctx, snap, engine.ForkOptions{})
		if err != nil {
			return report, err
		}
		answered := time.Since(start)
		forks = append(forks, sb)
		before, err := sb.Stats(ctx)
		if err != nil {
			return report, err
		}
		begin := time.Now()
		if err := execProgram(ctx, sb.Agent(), cfg.Program); err != nil {
			return report, err
		}
		executed := answered + time.Since(begin)
		after, err := sb.Stats(ctx)
		if err != nil {
			return report, err
		}
		if i >= warmUps {
			floors, answers, execs = append(floors, d), append(answers, answered), append(execs, executed)
			restored = append(restored, microvm.Restored(sb))
			own, used = append(own, before.Own), append(used, after.Own)
		}
		if pings, err = repeat(pings, 2, func() error { return sb.Agent().Ping(ctx) }); err != nil {
			return report, err
		}
		if warm, err = repeat(warm, 1, func() error { return execProgram(ctx, sb.Agent(), cfg.Program) }); err != nil {
			return report, err
		}
	}
	report.Floor, report.Restored = Summarize(floors), Summarize(restored)
	report.FirstAnswer, report.FirstExec = Summarize(answers), Summarize(execs)
	report.Ping, report.Exec = Summarize(pings), Summarize(warm)
	report.OwnAfterAnswer, report.OwnAfterExec = median(own), median(used)
	for _, d := range answers {
		report.All += float64(d.Nanoseconds()) / 1e6
	}
	report.Alive, report.Noisy = len(forks), report.Floor.Noisy()
	return report, nil
}

func execProgram(ctx context.Context, agent *guestrpc.Client, program string) error {
	status, err := agent.Run(ctx, guestrpc.ExecRequest{Argv: []string{program}}, nil, nil, nil)
	if err != nil {
		return err
	}
	if status.Code != 0 {
		return fmt.Errorf("%s returned %d", program, status.Code)
	}
	return nil
}

// Print writes the report as a table.
func (r ForkReport) Print(w io.Writer) error {
	fmt.Fprintf(w, "%d forks of a %s guest, %d MiB, %d vCPU; milliseconds\n", r.Count, r.Guest, r.Memory>>20, r.VCPUs)
	err := printTable(w, r.Floor, []row{
		{"floor", r.Floor}, {"state restored", r.Restored}, {"first instruction", r.FirstInstruction},
		{"first instruction, from a shell", r.FromShell}, {"first answer", r.FirstAnswer},
		{"first exec done", r.FirstExec}, {"warm ping", r.Ping}, {"warm exec", r.Exec},
	})
	if err != nil {
		return err
	}
	if r.OwnAfterAnswer > 0 {
		fmt.Fprintf(w, "private memory of a fork's process: %d KiB after the first answer, %d KiB after a program\n", r.OwnAfterAnswer>>10, r.OwnAfterExec>>10)
	}
	fmt.Fprintf(w, "%d forks alive at the end\n", r.Alive)
	if r.Noisy {
		fmt.Fprintln(w, noisyWarning)
	}
	return nil
}

// row is a line of a table; one without samples is left out.
type row struct {
	name string
	s    Summary
}

const noisyWarning = "too noisy: the floor's median is more than 1.5 times its tenth percentile"

func printTable(w io.Writer, floor Summary, rows []row) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tn\tp10\tp50\tp90\tp99\tp50/floor\t")
	for _, r := range rows {
		if r.s.N > 0 {
			fmt.Fprintf(t, "%s\t%d\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t\n",
				r.name, r.s.N, r.s.P10, r.s.P50, r.s.P90, r.s.P99, r.s.P50/floor.P50)
		}
	}
	return t.Flush()
}
