// Package peers measures other microVM runtimes beside AgentRun, in one run. All use
// the same root filesystem, size and program, and alternate with each other and with
// the floor, so that ratios are meaningful. The package knows how to drive each of
// them. A peer that cannot run is listed with the reason.
package peers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"agentrun.dev/bench"
)

// Config configures Run.
type Config struct {
	// Guest is always a microVM of the default jail.
	bench.Guest
	// RootDir is the root filesystem as a folder; empty without one.
	RootDir string
	// Program is the path of a program in the root filesystem that does nothing.
	Program string
	// Boots, Warm, Forks and Lives are how often each is measured.
	Boots, Warm, Forks, Lives int
	// Dirty is how many bytes the source writes between two live forks.
	Dirty uint64
	// Python is an interpreter with microsandbox installed; empty without one.
	Python string
	// Firecracker is the path of its binary; empty without one.
	Firecracker string
	// Progress is called with the current step.
	Progress func(format string, args ...any)
}

// subject is a measured runtime. It keeps one source, a sandbox that others are
// forked from.
type subject interface {
	// open prepares everything that all sandboxes need.
	open(context.Context) error
	// boot starts a source, ends the previous one, and returns the time to its first
	// answer.
	boot(context.Context) (time.Duration, error)
	ping(context.Context) (time.Duration, error)
	exec(context.Context) (time.Duration, error)
	// freeze takes the snapshot that fork uses.
	freeze(context.Context) error
	// fork makes sandboxes, one for each of the subject's columns. It measures them
	// and ends them.
	fork(context.Context) ([]forked, error)
	// live dirties the source's memory and forks it while it runs.
	live(context.Context) (lived, error)
	close() error
}

// forked is one fork. Times are from the call.
type forked struct {
	running, answered, renewed, executed time.Duration // renewed is 0 without a renewal
	ownAfterAnswer, ownAfterExec         uint64        // bytes
}

// lived is one fork of a running source. Values that a runtime does not report are 0.
type lived struct {
	// silence is the longest time for which the source was not heard. pause is how
	// long the source stood still. answered is the time until the fork has answered.
	// next is how long the source then took to write to the same memory again.
	silence, pause, answered, next time.Duration
	// quiet is the silence without a fork, for as long as a fork took. pass is next
	// without a fork.
	quiet, pass time.Duration
}

// entrant is a subject with its measurements.
type entrant struct {
	subject
	peer                string
	columns             []string // the ways to fork; a single way has one name
	failed              error
	boots, pings, execs []time.Duration
	lives               []lived
	forks               [][]forked // by column
}

// Run measures AgentRun and its peers.
func Run(ctx context.Context, cfg Config) (_ Report, err error) {
	memory, err := os.MkdirTemp("/dev/shm", "agentrun-peers-")
	if err != nil {
		return Report{}, fmt.Errorf("bench peers: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(memory)) }()
	floor, err := bench.NewFloor()
	if err != nil {
		return Report{}, err
	}
	defer func() { err = errors.Join(err, floor.Close()) }()
	r := &race{cfg: cfg, floor: floor, entrants: []*entrant{
		{peer: AgentRun, columns: []string{newProcess, waitingProcess}, subject: &agentRun{cfg: cfg, memory: memory}},
		{peer: Microsandbox, columns: []string{"fork", "restore"}, subject: &microsandbox{cfg: cfg}},
		{peer: Firecracker, columns: []string{waitingProcess, newProcess}, subject: &firecracker{cfg: cfg, memory: memory}},
	}}
	defer func() {
		for _, e := range r.entrants {
			err = errors.Join(err, e.close())
		}
	}()
	if err := r.run(ctx); err != nil {
		return Report{}, err
	}
	return r.report(), nil
}

// Names of the measured runtimes.
const (
	AgentRun     = "AgentRun"
	Microsandbox = "microsandbox"
	Firecracker  = "Firecracker"
)

// Ways to fork that two runtimes share: with all steps, and into a process that was
// waiting.
const (
	newProcess     = "new process"
	waitingProcess = "waiting process"
)

type race struct {
	cfg      Config
	floor    *bench.Floor
	floors   []time.Duration
	entrants []*entrant
}

// stepLimit ends a peer that hangs. Its slowest step takes seconds.
const stepLimit = 5 * time.Minute

var errStepLimit = fmt.Errorf("no answer in %v", stepLimit)

// warmUps are rounds that are not counted.
const warmUps = 1

func (r *race) run(ctx context.Context) error {
	if _, err := r.floor.Sample(); err != nil { // the first sample fills caches
		return err
	}
	phases := []struct {
		name  string
		count int
		do    func(context.Context, *entrant, bool) error
	}{
		{"prepare", 1, func(ctx context.Context, e *entrant, _ bool) error { return e.open(ctx) }},
		{"boot", r.cfg.Boots, func(ctx context.Context, e *entrant, _ bool) error {
			d, err := e.boot(ctx)
			e.boots = append(e.boots, d)
			return err
		}},
		{"warm", r.cfg.Warm + warmUps, func(ctx context.Context, e *entrant, count bool) error {
			ping, err := e.ping(ctx)
			if err != nil {
				return err
			}
			exec, err := e.exec(ctx)
			if count {
				e.pings, e.execs = append(e.pings, ping), append(e.execs, exec)
			}
			return err
		}},
		{"snapshot", 1, func(ctx context.Context, e *entrant, _ bool) error { return e.freeze(ctx) }},
		{"fork", r.cfg.Forks + warmUps, func(ctx context.Context, e *entrant, count bool) error {
			forks, err := e.fork(ctx)
			if err == nil && count {
				e.forks = append(e.forks, forks)
			}
			return err
		}},
		{"live fork", r.cfg.Lives + warmUps, func(ctx context.Context, e *entrant, count bool) error {
			l, err := e.live(ctx)
			if err == nil && count {
				e.lives = append(e.lives, l)
			}
			return err
		}},
	}
	for _, p := range phases {
		for i := range p.count {
			for _, e := range r.entrants {
				if e.failed != nil {
					continue
				}
				d, err := r.floor.Sample()
				if err != nil {
					return err
				}
				r.floors = append(r.floors, d)
				r.cfg.Progress("%s %d/%d: %s", p.name, i+1, p.count, e.peer)
				step, cancel := context.WithTimeoutCause(ctx, stepLimit, errStepLimit)
				err = p.do(step, e, i >= warmUps)
				cancel()
				if err == nil {
					continue
				}
				if ctx.Err() != nil || e.peer == AgentRun {
					return fmt.Errorf("%s: %s: %w", e.peer, p.name, err)
				}
				e.failed = fmt.Errorf("%s: %w", p.name, err)
			}
		}
	}
	return nil
}

// column returns the measurements of one way to fork.
func (e *entrant) column(i int) (c Column) {
	c = Column{Peer: e.peer, Way: e.columns[i]}
	if e.failed != nil {
		c.Failed = e.failed.Error()
	}
	var running, answered, renewed, executed []time.Duration
	var fresh, used []uint64
	for _, f := range e.forks {
		running, answered, executed = append(running, f[i].running), append(answered, f[i].answered), append(executed, f[i].executed)
		if f[i].renewed > 0 {
			renewed = append(renewed, f[i].renewed)
		}
		fresh, used = append(fresh, f[i].ownAfterAnswer), append(used, f[i].ownAfterExec)
	}
	c.Running, c.Answered, c.Renewed, c.Executed = bench.Summarize(running), bench.Summarize(answered), bench.Summarize(renewed), bench.Summarize(executed)
	c.OwnAfterAnswer, c.OwnAfterExec = bench.Median(fresh), bench.Median(used)
	if i == 0 { // the source is the same for all columns
		c.Boot, c.Ping, c.Exec = bench.Summarize(e.boots), bench.Summarize(e.pings), bench.Summarize(e.execs)
		c.Silence = e.summarizeLives(func(l lived) time.Duration { return l.silence })
		c.Quiet = e.summarizeLives(func(l lived) time.Duration { return l.quiet })
		c.Pause = e.summarizeLives(func(l lived) time.Duration { return l.pause })
		c.Live = e.summarizeLives(func(l lived) time.Duration { return l.answered })
		c.Pass = e.summarizeLives(func(l lived) time.Duration { return l.pass })
		c.Next = e.summarizeLives(func(l lived) time.Duration { return l.next })
	}
	return c
}

// summarizeLives summarizes one measurement of live forks, of those forks that have
// it.
func (e *entrant) summarizeLives(of func(lived) time.Duration) bench.Summary {
	var sample []time.Duration
	for _, l := range e.lives {
		if d := of(l); d > 0 {
			sample = append(sample, d)
		}
	}
	return bench.Summarize(sample)
}

func (r *race) report() Report {
	report := Report{
		Memory: r.cfg.Memory, VCPUs: r.cfg.VCPUs, Dirty: r.cfg.Dirty, Floor: bench.Summarize(r.floors),
	}
	for _, e := range r.entrants {
		for i := range e.columns {
			report.Columns = append(report.Columns, e.column(i))
		}
	}
	report.Noisy = report.Floor.Noisy()
	return report
}
