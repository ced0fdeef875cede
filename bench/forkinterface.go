package bench

import (
	"context"
	"errors"
	"fmt"
	"io"

	"agentrun.dev/internal/engine/gvisor"
)

// InterfaceReport measures forks with a network interface. They alternate with forks
// of the same guest without one. The other ends of their wires are not used.
type InterfaceReport struct {
	// Floor was sampled alternating with these forks.
	Floor       Summary `json:"floor"`
	Restored    Summary `json:"restored"`
	FirstAnswer Summary `json:"first_answer"`
	FirstExec   Summary `json:"first_exec"`
	AfterAnswer Memory  `json:"memory_after_answer"`
	AfterExec   Memory  `json:"memory_after_exec"`
	// P10 and P50 are the times to the first answer, relative to forks without an
	// interface.
	P10 float64 `json:"first_answer_ratio_p10"`
	P50 float64 `json:"first_answer_ratio_p50"`
}

// openWired makes a second snapshot, of the same guest with an interface, with an
// engine of its own: an engine makes sandboxes ahead and learns for one snapshot.
func (s *forkSource) openWired(ctx context.Context) (err error) {
	cfg := s.cfg
	cfg.Interface, cfg.Spares, cfg.wired = false, 0, true
	s.wired, err = newForkSource(ctx, cfg)
	if err == nil {
		s.undo = append(s.undo, s.wired.close)
	}
	return err
}

// precreated waits until all sandboxes to be made ahead by both engines are ready, so
// that none is being made while a fork is measured.
func (s *forkSource) precreated(ctx context.Context) error {
	for _, from := range []*forkSource{s, s.wired} {
		if from == nil || !from.forked || s.cfg.Precreate == 0 {
			continue
		}
		if e, ok := from.engine.(*gvisor.Engine); ok {
			if err := e.Precreated(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// interfaces summarizes forks with an interface.
func (all *forkSamples) interfaces(without Summary) *InterfaceReport {
	r := &InterfaceReport{
		Floor: Summarize(all.floors), Restored: Summarize(all.restored),
		FirstAnswer: Summarize(all.answers), FirstExec: Summarize(all.execs),
		AfterAnswer: medianMemory(all.fresh), AfterExec: medianMemory(all.used),
	}
	r.P10, r.P50 = r.FirstAnswer.P10/without.P10, r.FirstAnswer.P50/without.P50
	return r
}

func (r *InterfaceReport) print(w io.Writer) error {
	if r == nil {
		return nil
	}
	fmt.Fprintln(w, "\nas many forks, in turns with these, with a network interface")
	err := printTable(w, r.Floor, []row{
		{"floor", r.Floor}, {"state restored", r.Restored}, {"first answer", r.FirstAnswer}, {"first exec done", r.FirstExec},
	})
	_, printErr := fmt.Fprintf(w, "first answer: %.3f times as long as without one (p10: %.3f)\n", r.P50, r.P10)
	return errors.Join(err, printErr)
}
