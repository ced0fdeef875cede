package peers

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"agentrun.dev/bench"
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/storage/snapshot"
)

// agentRun is AgentRun, driven through its engine.
type agentRun struct {
	cfg    Config
	memory string

	engine *microvm.Engine
	root   *os.File
	source engine.Sandbox
	snap   *snapshot.Snapshot
}

func (a *agentRun) open(context.Context) (err error) {
	if a.engine, err = microvm.New(microvm.Config{Resident: a.memory, Scratch: filepath.Join(a.cfg.Folder, "scratch")}); err != nil {
		return err
	}
	a.root, err = os.Open(a.cfg.Root)
	return err
}

func (a *agentRun) boot(ctx context.Context) (time.Duration, error) {
	if a.source != nil {
		if err := a.source.Close(); err != nil {
			return 0, err
		}
	}
	begin := time.Now()
	var err error
	a.source, err = a.engine.Boot(ctx, engine.Spec{Root: a.root, Memory: a.cfg.Memory, VCPUs: a.cfg.VCPUs})
	if err != nil {
		return 0, err
	}
	return timed(begin, func() error { return a.source.Agent().Ping(ctx) })
}

func (a *agentRun) ping(ctx context.Context) (time.Duration, error) {
	return timed(time.Now(), func() error { return a.source.Agent().Ping(ctx) })
}

func (a *agentRun) exec(ctx context.Context) (time.Duration, error) {
	return timed(time.Now(), func() error { return runProgram(ctx, a.source.Agent(), a.cfg.Program) })
}

func (a *agentRun) freeze(ctx context.Context) (err error) {
	if a.snap, err = a.source.Snapshot(ctx, filepath.Join(a.cfg.Folder, "snapshot")); err != nil {
		return err
	}
	return bench.Teach(ctx, a.engine, a.snap)
}

// fork makes one fork in a process of its own, and one into a waiting spare.
func (a *agentRun) fork(ctx context.Context) (_ []forked, err error) {
	cold, err := a.forkOne(ctx, nil)
	if err != nil {
		return nil, err
	}
	spares, err := a.engine.KeepSpares(a.snap, 1)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, spares.Close()) }()
	if err := spares.WaitFull(ctx); err != nil {
		return nil, err
	}
	ahead, err := a.forkOne(ctx, spares)
	return []forked{cold, ahead}, err
}

func (a *agentRun) forkOne(ctx context.Context, spares engine.Spares) (f forked, err error) {
	begin := time.Now()
	sb, err := a.engine.Fork(ctx, a.snap, engine.ForkOptions{})
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, sb.Close()) }()
	// The first answer confirms the new identity.
	f = forked{running: microvm.Restored(sb), renewed: time.Since(begin)}
	f.answered = f.renewed
	if spares != nil {
		if !microvm.FromSpare(sb) {
			return f, errors.New("no spare waited")
		}
		if err := spares.WaitFull(ctx); err != nil { // making the next spare must not disturb the program
			return f, err
		}
	}
	id, err := microvm.Identify(sb)
	if err != nil {
		return f, err
	}
	return f.use(ctx, sb.Agent(), id.PID, a.cfg.Program)
}

func (a *agentRun) live(ctx context.Context) (l lived, err error) {
	if l.pass, err = passes(ctx, a.source.Agent(), a.cfg.Dirty); err != nil {
		return l, err
	}
	l.silence, err = bench.Silence(ctx, a.source.Agent(), func() error {
		begin := time.Now()
		f, err := a.source.Fork(ctx, make([]engine.ForkOptions, 1))
		if err != nil {
			return err
		}
		if f.Forks[0] == nil {
			return f.Errs[0]
		}
		l.pause, l.answered = f.Stats.Pause, time.Since(begin)
		return f.Forks[0].Close()
	})
	if err != nil {
		return l, err
	}
	if l.next, err = pass(ctx, a.source.Agent(), a.cfg.Dirty); err != nil {
		return l, err
	}
	l.quiet, err = bench.QuietSilence(ctx, a.source.Agent(), l.answered)
	return l, err
}

func (a *agentRun) close() error {
	var errs []error
	if a.source != nil {
		errs = append(errs, a.source.Close())
	}
	if a.snap != nil {
		errs = append(errs, a.snap.Close())
	}
	if a.root != nil {
		errs = append(errs, a.root.Close())
	}
	if a.engine != nil {
		errs = append(errs, a.engine.Close())
	}
	return errors.Join(errs...)
}
