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
	"agentrun.dev/internal/engine/gvisor"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/host/procid"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/storage/snapshot"
)

// Guests to measure forks with.
const (
	GuestLinux = "linux"
	GuestTest  = "test"
)

// ForkConfig configures Fork and ForkBare.
type ForkConfig struct {
	Guest
	// Program is a program of the root filesystem that does nothing.
	Program string
	// Count is how many forks are made one after the other. Forks of Linux all stay
	// alive. Of the bare guest, Count further forks stay alive, to measure their
	// memory.
	Count int
	// Walls are numbers of forks to make against the wall clock. Parallel is how many
	// of them are made at once.
	Walls    []int
	Parallel int
	// Spares is how many spares wait for Count further forks, which alternate with
	// the others. 0 makes none of them. Linux only.
	Spares int
	// Warm is a shell script that runs before the guest is frozen.
	Warm string
	// Precreate is how many sandboxes gVisor makes ahead of each fork.
	Precreate int
	// Interface says whether Count further forks are made of a guest with a network
	// interface, alternating with the others. Linux only.
	Interface bool

	// wired says whether the guest has an interface.
	wired bool
}

// network is the guest's interface; nil without one.
func (c *ForkConfig) network() *engine.Network {
	if !c.wired {
		return nil
	}
	return node.Interface()
}

// ForkReport is the result of Fork and ForkBare. Times are from the call.
// Measurements that do not apply to a guest have no samples.
type ForkReport struct {
	Engine string `json:"engine"`
	Guest  string `json:"guest"`
	Memory uint64 `json:"memory_bytes"`
	VCPUs  int    `json:"vcpus"`
	Count  int    `json:"count"`
	// Precreate is how many sandboxes were made ahead of each fork.
	Precreate int     `json:"precreate,omitempty"`
	Floor     Summary `json:"floor"`
	// Restored: the machine's state is loaded. FirstInstruction: the guest was seen
	// to run. FromSpare: the same, with VM, vCPU and memory made ahead. Only the bare
	// guest shows the last two.
	Restored         Summary `json:"restored"`
	FirstInstruction Summary `json:"first_instruction"`
	FromSpare        Summary `json:"first_instruction_from_shell"`
	// FirstAnswer is the time to the agent's first answer, including the fork's new
	// identity. FirstExec is the time to the exit status of a program. Both are only
	// for Linux.
	FirstAnswer Summary `json:"first_answer"`
	FirstExec   Summary `json:"first_exec"`
	// Ping and Exec are measured in forks that have been used before.
	Ping Summary `json:"warm_ping"`
	Exec Summary `json:"warm_exec"`
	// AfterAnswer is the memory of a fork after its answer (of a bare guest: after it
	// has run). AfterExec is its memory after it has run a program.
	AfterAnswer Memory `json:"memory_after_answer"`
	AfterExec   Memory `json:"memory_after_exec"`
	// Spares measures forks into waiting spares; nil without any.
	Spares *SpareReport `json:"from_shells,omitempty"`
	// Interface measures forks with a network interface; nil without any.
	Interface *InterfaceReport `json:"with_interface,omitempty"`
	// KernelFrom says where the growth of the kernel's memory was measured: cgroup or
	// machine.
	KernelFrom string `json:"kernel_memory_of"`
	Walls      []Wall `json:"walls"`
	Alive      int    `json:"alive"`
	Noisy      bool   `json:"noisy"`
}

// Wall is the time until a number of forks had answered.
type Wall struct {
	Forks    int     `json:"forks"`
	Parallel int     `json:"parallel"`
	MS       float64 `json:"ms"`
}

// Fork measures forks of a Linux guest. Each is a new process, and gets an identity.
func Fork(ctx context.Context, cfg ForkConfig) (_ ForkReport, err error) {
	report := ForkReport{
		Engine: string(cfg.engine()), Guest: GuestLinux, Memory: cfg.Memory, VCPUs: cfg.VCPUs, Count: cfg.Count, Precreate: cfg.Precreate,
	}
	s, err := newForkSource(ctx, cfg)
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.measure(ctx, &report); err != nil {
		return report, err
	}
	report.Walls, err = walls(ctx, cfg, func(ctx context.Context) (func() error, error) {
		sb, err := s.engine.Fork(ctx, s.snap, engine.ForkOptions{})
		if err != nil {
			return nil, err
		}
		return sb.Close, nil
	})
	return report, err
}

// forkSource is a snapshot of a warm guest, with everything that it needs.
type forkSource struct {
	cfg    ForkConfig
	engine engine.Engine
	snap   *snapshot.Snapshot
	ahead  ahead
	// wired is the same guest with a network interface; nil if it is not measured.
	wired *forkSource
	// forked says whether a fork was made. Only then does the engine make anything
	// ahead.
	forked bool
	undo   []func() error
}

func newForkSource(ctx context.Context, cfg ForkConfig) (_ *forkSource, err error) {
	s := &forkSource{cfg: cfg}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("prepare the benchmark: %w", err), s.close())
		}
	}()
	resident, err := os.MkdirTemp("/dev/shm", "agentrun-bench-")
	if err != nil {
		return nil, err
	}
	s.undo = append(s.undo, func() error { return os.RemoveAll(resident) })
	s.engine, err = pick.Open(cfg.engine(), pick.Config{
		Resident: resident, Scratch: filepath.Join(cfg.Folder, "scratch"), Jail: cfg.Jail, Precreate: cfg.Precreate,
	})
	if err != nil {
		return nil, err
	}
	s.undo = append(s.undo, s.engine.Close)
	source, err := bootWarm(ctx, s.engine, cfg)
	if err != nil {
		return nil, err
	}
	s.undo = append(s.undo, source.Close)
	dir := "snapshot"
	if cfg.wired {
		dir = "snapshot-wired"
	}
	if s.snap, err = source.Snapshot(ctx, filepath.Join(cfg.Folder, dir)); err != nil {
		return nil, err
	}
	s.undo = append(s.undo, s.snap.Close)
	if err := source.Pause(ctx); err != nil { // it must not disturb its children
		return nil, err
	}
	if cfg.Interface {
		if err := s.openWired(ctx); err != nil {
			return nil, err
		}
	}
	return s, s.openAhead(ctx, resident)
}

// bootWarm boots the root filesystem and brings it to the state in which a template
// is captured: the program and the warm-up script have run, postponed work is done,
// and the session with the agent is closed.
func bootWarm(ctx context.Context, e engine.Engine, cfg ForkConfig) (_ engine.Sandbox, err error) {
	root, err := os.Open(cfg.Root)
	if err != nil {
		return nil, err
	}
	defer func() { _ = root.Close() }() // only read
	source, err := e.Boot(ctx, engine.Spec{Root: root, Memory: cfg.Memory, VCPUs: cfg.VCPUs, Limits: engine.Limits{Background: true}, Network: cfg.network()})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, source.Close())
		}
	}()
	if _, err := repeat(nil, 0, func() error { return execProgram(ctx, source.Agent(), cfg.Program) }); err != nil {
		return nil, err
	}
	if cfg.Warm != "" {
		if err := execProgram(ctx, source.Agent(), "sh", "-c", cfg.Warm); err != nil {
			return nil, err
		}
	}
	if err := source.Settle(ctx); err != nil {
		return nil, err
	}
	// A template's session is closed before its capture, too.
	return source, source.Agent().Close()
}

// identify returns the id of a sandbox's process.
func (g *Guest) identify(sb engine.Sandbox) (procid.ID, error) {
	if g.engine() == pick.GVisor {
		return gvisor.Identify(sb)
	}
	return microvm.Identify(sb)
}

func (s *forkSource) close() error { return undoAll(s.undo) }

// forkSamples are the samples of a report.
type forkSamples struct {
	floors, restored, answers, execs, pings, warm []time.Duration
	fresh, used                                   []Memory
}

// measure makes forks one after the other, and samples the floor in between.
func (s *forkSource) measure(ctx context.Context, report *ForkReport) (err error) {
	floor, err := floorOf(s.cfg.engine(), s.cfg.Root, s.cfg.Warm)
	if err != nil {
		return err
	}
	var undo []func() error
	defer func() { err = errors.Join(err, undoAll(undo), floor.Close()) }()
	kernel := newKernelMemory()
	var all, ahead, wired forkSamples
	turn := func(samples *forkSamples, fork forkFunc) error {
		d, err := floor.Sample()
		if err != nil {
			return err
		}
		samples.floors = append(samples.floors, d)
		sb, err := s.measureOne(ctx, kernel, samples, fork)
		if sb != nil {
			undo = append(undo, sb.Close)
		}
		return err
	}
	for i := range s.cfg.Count + warmUps {
		if i == warmUps { // the samples so far are warm-ups and do not count
			all, ahead, wired = forkSamples{}, forkSamples{}, forkSamples{}
		}
		if err := turn(&all, s.cold); err != nil {
			return err
		}
		if s.wired != nil {
			if err := turn(&wired, s.wired.cold); err != nil {
				return err
			}
		}
		if s.cfg.Spares == 0 {
			continue
		}
		if err := s.ahead.spares.WaitFull(ctx); err != nil {
			return err
		}
		if err := turn(&ahead, s.fromSpare); err != nil {
			return err
		}
	}
	if s.cfg.Spares > 0 {
		report.Spares = ahead.spares(s.cfg.Spares)
	}
	report.Floor, report.Restored = Summarize(all.floors), Summarize(all.restored)
	report.FirstAnswer, report.FirstExec = Summarize(all.answers), Summarize(all.execs)
	if s.wired != nil {
		report.Interface = wired.interfaces(report.FirstAnswer)
	}
	report.Ping, report.Exec = Summarize(all.pings), Summarize(all.warm)
	report.AfterAnswer, report.AfterExec = medianMemory(all.fresh), medianMemory(all.used)
	report.KernelFrom = kernel.From
	report.Alive, report.Noisy = len(undo), report.Floor.Noisy()
	return nil
}

// forkFunc makes a fork and returns the time to its answer.
type forkFunc func(context.Context) (engine.Sandbox, time.Duration, error)

// cold makes a fork without anything made ahead.
func (s *forkSource) cold(ctx context.Context) (engine.Sandbox, time.Duration, error) {
	sb, took, err := timedFork(ctx, s.engine, s.snap)
	s.forked = s.forked || err == nil
	return sb, took, err
}

func timedFork(ctx context.Context, e engine.Engine, snap *snapshot.Snapshot) (engine.Sandbox, time.Duration, error) {
	start := time.Now()
	sb, err := e.Fork(ctx, snap, engine.ForkOptions{})
	return sb, time.Since(start), err
}

// measureOne makes a fork, which stays alive, and uses it.
func (s *forkSource) measureOne(ctx context.Context, kernel kernelMemory, all *forkSamples, fork forkFunc) (engine.Sandbox, error) {
	before, err := kernel.read()
	if err == nil {
		err = s.precreated(ctx)
	}
	if err != nil {
		return nil, err
	}
	sb, answered, err := fork(ctx)
	if err != nil {
		return sb, err
	}
	id, err := s.cfg.identify(sb)
	if err != nil {
		return sb, err
	}
	look := func(sample []Memory) ([]Memory, error) {
		m, err := s.memory(id.PID)
		if err != nil {
			return sample, err
		}
		m.Kernel, err = kernel.grown(before)
		return append(sample, m), err
	}
	if all.fresh, err = look(all.fresh); err != nil {
		return sb, err
	}
	begin := time.Now()
	if err := execProgram(ctx, sb.Agent(), s.cfg.Program); err != nil {
		return sb, err
	}
	executed := answered + time.Since(begin)
	if all.used, err = look(all.used); err != nil {
		return sb, err
	}
	all.restored = append(all.restored, microvm.Restored(sb)+gvisor.Restored(sb)) // one of the two is 0
	all.answers, all.execs = append(all.answers, answered), append(all.execs, executed)
	if all.pings, err = repeat(all.pings, 2, func() error { return sb.Agent().Ping(ctx) }); err != nil {
		return sb, err
	}
	all.warm, err = repeat(all.warm, 1, func() error { return execProgram(ctx, sb.Agent(), s.cfg.Program) })
	return sb, err
}

// memory reads the memory of a fork.
func (s *forkSource) memory(pid int) (Memory, error) {
	if s.cfg.engine() != pick.GVisor {
		return ReadMemory(pid, s.cfg.Memory)
	}
	p, err := gvisor.ReadParts(pid)
	return Memory{Guest: p.Programs, Process: p.Anonymous, ProcessShare: p.Anonymous + p.Files, PageTables: p.PageTables}, err
}

func execProgram(ctx context.Context, agent *guestrpc.Client, argv ...string) error {
	status, err := agent.Run(ctx, guestrpc.ExecRequest{Argv: argv}, nil, nil, nil)
	if err != nil {
		return err
	}
	if status.Code != 0 {
		return fmt.Errorf("%s returned %d", argv[0], status.Code)
	}
	return nil
}

// Print writes the report as a table.
func (r ForkReport) Print(w io.Writer) error {
	fmt.Fprintf(w, "%d forks of a %s guest on %s, %d MiB, %d vCPU; milliseconds\n", r.Count, r.Guest, r.Engine, r.Memory>>20, r.VCPUs)
	if r.Precreate > 0 {
		fmt.Fprintf(w, "%d sandboxes waited before each fork: made, the state of their kernels read, no page of programs copied\n", r.Precreate)
	}
	err := printTable(w, r.Floor, []row{
		{"floor", r.Floor}, {"state restored", r.Restored}, {"first instruction", r.FirstInstruction},
		{"first instruction, from a spare", r.FromSpare}, {"first answer", r.FirstAnswer},
		{"first exec done", r.FirstExec}, {"warm ping", r.Ping}, {"warm exec", r.Exec},
	})
	if err != nil {
		return err
	}
	if err := r.Spares.print(w); err != nil {
		return err
	}
	if err := r.Interface.print(w); err != nil {
		return err
	}
	if err := r.printMemory(w); err != nil {
		return err
	}
	for _, wall := range r.Walls {
		fmt.Fprintf(w, "%d forks, %d at once: all had answered after %.0f ms, %.2f ms each\n",
			wall.Forks, wall.Parallel, wall.MS, wall.MS/float64(wall.Forks))
	}
	fmt.Fprintf(w, "%d forks alive at the end\n", r.Alive)
	if r.Noisy {
		fmt.Fprintln(w, NoisyWarning)
	}
	return nil
}

func (r ForkReport) printMemory(w io.Writer) error {
	fmt.Fprintf(w, "\nmemory of a fork, KiB (the kernel: by the growth of the %s's)\n", r.KernelFrom)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tguest pages\tprocess, private\tprocess, PSS\tkernel\tof that page tables\t")
	type line struct {
		name string
		m    Memory
	}
	lines := []line{{"after the first answer", r.AfterAnswer}, {"after a program", r.AfterExec}}
	if r.Spares != nil {
		lines = append(lines, line{"from a spare, after the first answer", r.Spares.AfterAnswer}, line{"from a spare, after a program", r.Spares.AfterExec})
	}
	if i := r.Interface; i != nil {
		lines = append(lines, line{"with an interface, after the first answer", i.AfterAnswer}, line{"with an interface, after a program", i.AfterExec})
	}
	for _, line := range lines {
		if m := line.m; m != (Memory{}) {
			fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%d\t\n",
				line.name, m.Guest>>10, m.Process>>10, m.ProcessShare>>10, m.Kernel>>10, m.PageTables>>10)
		}
	}
	return t.Flush()
}

// row is a line of a table. A row without samples is left out.
type row struct {
	name string
	s    Summary
}

// NoisyWarning is printed in a report with a disturbed floor.
const NoisyWarning = "too noisy: the floor's median is more than 1.5 times its tenth percentile"

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
