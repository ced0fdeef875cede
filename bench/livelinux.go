package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/guest/guestrpc"
)

// Live measures live forks of a Linux guest, identities included.
func Live(ctx context.Context, cfg LiveConfig) (report LiveReport, err error) {
	report = newLiveReport(GuestLinux, cfg)
	resident, err := os.MkdirTemp("/dev/shm", "agentrun-bench-")
	if err != nil {
		return report, fmt.Errorf("bench live: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(resident)) }()
	e, err := pick.Open(cfg.engine(), pick.Config{Resident: resident, Scratch: filepath.Join(cfg.Folder, "scratch"), Jail: cfg.Jail})
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	root, err := os.Open(cfg.Root)
	if err != nil {
		return report, fmt.Errorf("bench live: %w", err)
	}
	defer func() { _ = root.Close() }() // only read
	source, err := e.Boot(ctx, engine.Spec{Root: root, Memory: cfg.Memory, VCPUs: cfg.VCPUs})
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, source.Close()) }()
	p := startToucher(ctx, source, cfg)
	defer p.stop()
	floor, err := floorOf(cfg.engine(), cfg.Root, "")
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, floor.Close()) }()
	var s liveSamples
	for i := range cfg.Count + warmUps {
		if i == warmUps {
			s = liveSamples{}
		}
		d, err := floor.Sample()
		if err != nil {
			return report, err
		}
		s.floor = append(s.floor, d)
		if err := liveRound(ctx, source, p, &s, &report); err != nil {
			return report, fmt.Errorf("bench live: %w", err)
		}
	}
	s.summarize(&report)
	return report, nil
}

// liveRound measures a fork of a source that writes all the time, and a fork with ten
// children.
func liveRound(ctx context.Context, source engine.Sandbox, p *toucher, s *liveSamples, r *LiveReport) error {
	if _, _, err := p.run(onePass, nil); err != nil { // finishes the aftermath of the last round
		return err
	}
	wait, pass, err := p.run(longPasses, nil)
	if err != nil {
		return err
	}
	s.quietStalls.longest, s.quietPass = append(s.quietStalls.longest, wait), append(s.quietPass, pass)
	wait, pass, err = p.run(longPasses, func() error {
		d, err := liveForks(ctx, source, 1, s, r)
		s.one = append(s.one, d)
		return err
	})
	if err != nil {
		return err
	}
	s.stalls.longest, s.pass = append(s.stalls.longest, wait), append(s.pass, pass)
	d, err := liveForks(ctx, source, 10, s, r)
	if err != nil {
		return err
	}
	s.ten = append(s.ten, d)
	_, pass, err = p.run(onePass, nil)
	s.next = append(s.next, pass)
	if err != nil {
		return err
	}
	silent, err := Silence(ctx, source.Agent(), func() error {
		d, err = liveForks(ctx, source, 1, s, r)
		return err
	})
	if err != nil {
		return err
	}
	quiet, err := QuietSilence(ctx, source.Agent(), d)
	s.silence, s.quietSilence = append(s.silence, silent), append(s.quietSilence, quiet)
	return err
}

// liveForks forks a source and returns once all children have answered.
func liveForks(ctx context.Context, source engine.Sandbox, children int, s *liveSamples, r *LiveReport) (time.Duration, error) {
	start := time.Now()
	f, err := source.Fork(ctx, make([]engine.ForkOptions, children))
	if err != nil {
		return 0, err
	}
	d := time.Since(start)
	errs := f.Errs
	for _, child := range f.Forks {
		if child != nil {
			errs = append(errs, child.Close())
		}
	}
	s.pause, s.captured = append(s.pause, f.Stats.Pause), append(s.captured, f.Stats.Captured)
	if f.Stats.Waits > 0 {
		s.served.add(f.Stats.MedianWait, f.Stats.P99Wait, f.Stats.LongestWait)
	}
	r.WhyCopiedInPause, r.Copied = f.Stats.WhyCopiedInPause, f.Stats.Copied
	return d, errors.Join(errs...)
}

// Commands of guest/rootfs/touch-pages.c.
const (
	onePass    = "p"
	longPasses = "l"
)

// toucher is a program in the guest that writes to its memory on command.
type toucher struct {
	commands *io.PipeWriter
	results  *bufio.Scanner
	ended    chan error
}

func startToucher(ctx context.Context, sb engine.Sandbox, cfg LiveConfig) *toucher {
	in, commands := io.Pipe()
	results, out := io.Pipe()
	p := &toucher{commands, bufio.NewScanner(results), make(chan error, 1)}
	go func() {
		argv := []string{"touch-pages", strconv.FormatUint(cfg.Dirty>>20, 10), strconv.Itoa(cfg.Stride)}
		st, err := sb.Agent().Run(ctx, guestrpc.ExecRequest{Argv: argv}, in, out, io.Discard)
		if err == nil && st.Code != 0 {
			err = fmt.Errorf("touch-pages ended with %d: --dirty and --stride need less than --memory", st.Code)
		}
		_ = out.CloseWithError(errors.Join(err, io.EOF)) // it never fails
		p.ended <- err
	}()
	return p
}

func (p *toucher) stop() { _ = p.commands.Close() }

// run sends a command, runs beside meanwhile, and returns the longest write and the
// longest pass.
func (p *toucher) run(command string, beside func() error) (longest, pass time.Duration, err error) {
	if _, err := io.WriteString(p.commands, command); err != nil {
		return 0, 0, err
	}
	if beside != nil {
		if err := beside(); err != nil {
			return 0, 0, err
		}
	}
	if !p.results.Scan() {
		return 0, 0, errors.Join(errors.New("the program in the guest ended"), p.results.Err())
	}
	_, err = fmt.Sscan(p.results.Text(), &longest, &pass)
	return longest, pass, err
}
