package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/storage/snapshot"
)

// SpareReport measures forks into waiting spares: processes with VM, vCPU and memory
// made ahead, and the state not yet loaded.
type SpareReport struct {
	// Spares is how many spares waited.
	Spares int `json:"shells"`
	// Floor was sampled alternating with these forks.
	Floor       Summary `json:"floor"`
	Restored    Summary `json:"restored"`
	FirstAnswer Summary `json:"first_answer"`
	// FirstExec does not include the time in which the next spare is made.
	FirstExec   Summary `json:"first_exec"`
	AfterAnswer Memory  `json:"memory_after_answer"`
	AfterExec   Memory  `json:"memory_after_exec"`
}

// ahead is an engine that keeps spares waiting. The forks of the other engine have
// none.
type ahead struct {
	engine *microvm.Engine
	spares engine.Spares
}

func (s *forkSource) openAhead(ctx context.Context, resident string) (err error) {
	if s.cfg.Spares == 0 {
		return nil
	}
	s.ahead.engine, err = microvm.New(microvm.Config{Resident: resident, Scratch: filepath.Join(s.cfg.Folder, "scratch"), Jail: s.cfg.Jail})
	if err != nil {
		return err
	}
	s.undo = append(s.undo, s.ahead.engine.Close)
	if err := Teach(ctx, s.ahead.engine, s.snap); err != nil {
		return err
	}
	s.ahead.spares, err = s.ahead.engine.KeepSpares(s.snap, s.cfg.Spares)
	return err
}

// Teach makes the forks that an engine learns from. These forks are cold and watched.
// The forks measured afterwards are like all later ones.
func Teach(ctx context.Context, e engine.Engine, snap *snapshot.Snapshot) error {
	for range microvm.ForksAsked {
		sb, err := e.Fork(ctx, snap, engine.ForkOptions{})
		if err != nil {
			return err
		}
		if err := sb.Close(); err != nil {
			return err
		}
	}
	return nil
}

// fromSpare makes a fork into a spare, and returns once that spare was replaced.
func (s *forkSource) fromSpare(ctx context.Context) (engine.Sandbox, time.Duration, error) {
	sb, took, err := timedFork(ctx, s.ahead.engine, s.snap)
	if err == nil && !microvm.FromSpare(sb) {
		err = errors.New("no spare waited, although all were there")
	}
	if err == nil {
		err = s.ahead.spares.WaitFull(ctx)
	}
	return sb, took, err
}

// spares summarizes forks into n spares.
func (all *forkSamples) spares(n int) *SpareReport {
	return &SpareReport{
		Spares: n, Floor: Summarize(all.floors), Restored: Summarize(all.restored),
		FirstAnswer: Summarize(all.answers), FirstExec: Summarize(all.execs),
		AfterAnswer: medianMemory(all.fresh), AfterExec: medianMemory(all.used),
	}
}

func (r *SpareReport) print(w io.Writer) error {
	if r == nil {
		return nil
	}
	fmt.Fprintf(w, "\nas many forks, in turns with these, into spares of which %d waited\n", r.Spares)
	return printTable(w, r.Floor, []row{
		{"floor", r.Floor}, {"state restored", r.Restored}, {"first answer", r.FirstAnswer}, {"first exec done", r.FirstExec},
	})
}
