package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client/local"
)

// forkReport is the output of agentrun fork.
type forkReport struct {
	Forks []forkOutcome `json:"forks"`
	// Milliseconds is the time from the call until all forks have answered and
	// are known.
	Milliseconds float64 `json:"ms"`
	// Live is the cost for a running source.
	Live *liveReport `json:"live,omitempty"`
}

type forkOutcome struct {
	Name  local.Name `json:"name"`
	Error string     `json:"error,omitempty"`
	err   error
}

// liveReport is engine.LiveForkStats for people and programs.
type liveReport struct {
	Pause            float64 `json:"pause_ms"`
	Captured         float64 `json:"captured_ms"`
	Waits            uint64  `json:"stalled_writes"`
	MedianWait       float64 `json:"stall_p50_ms"`
	P99Wait          float64 `json:"stall_p99_ms"`
	LongestWait      float64 `json:"stall_longest_ms"`
	Copied           uint64  `json:"copied_bytes"`
	WhyCopiedInPause string  `json:"stood_still,omitempty"`
}

func newForkReport(names []local.Name, f *local.Forked, took time.Duration) forkReport {
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }
	r := forkReport{Milliseconds: ms(took)}
	for i, err := range f.Errs {
		o := forkOutcome{Name: names[i], err: err}
		if err != nil {
			o.Error = err.Error()
		}
		r.Forks = append(r.Forks, o)
	}
	if st := f.Live; st != nil {
		r.Live = &liveReport{
			Pause: ms(st.Pause), Captured: ms(st.Captured), Waits: st.Waits, MedianWait: ms(st.MedianWait),
			P99Wait: ms(st.P99Wait), LongestWait: ms(st.LongestWait), Copied: st.Copied, WhyCopiedInPause: st.WhyCopiedInPause,
		}
	}
	return r
}

// report prints the outcomes. It returns the errors of the forks that failed.
func (o *forkOptions) report(r forkReport, stdout, stderr io.Writer) error {
	var failed []error
	for _, f := range r.Forks {
		if f.err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", f.Name, f.err))
		} else if !o.json {
			if _, err := fmt.Fprintln(stdout, f.Name); err != nil {
				return err
			}
		}
	}
	if o.json {
		e := json.NewEncoder(stdout)
		e.SetIndent("", "  ")
		if err := e.Encode(r); err != nil {
			return err
		}
	}
	if o.verbose {
		if err := r.explain(stderr); err != nil {
			return err
		}
	}
	return errors.Join(failed...)
}

// explain prints the cost, for people.
func (r forkReport) explain(w io.Writer) error {
	text := fmt.Sprintf("%d forks in %.0f ms\n", len(r.Forks), r.Milliseconds)
	if l := r.Live; l != nil {
		text += fmt.Sprintf("the source stood still for %.1f ms; %.1f MiB were copied in %.0f ms\n", l.Pause, float64(l.Copied)/(1<<20), l.Captured)
		text += fmt.Sprintf("%d of its writes waited: p50 %.2f ms, p99 %.2f ms, longest %.2f ms\n", l.Waits, l.MedianWait, l.P99Wait, l.LongestWait)
		if l.WhyCopiedInPause != "" {
			text += "it stood still for all of the copy: " + l.WhyCopiedInPause + "\n"
		}
	}
	_, err := io.WriteString(w, text)
	return err
}

// explainFork prints the cost of a fork of the daemon, as far as the daemon's
// answer includes it.
func explainFork(f rest.Fork, took time.Duration, w io.Writer) error {
	text := fmt.Sprintf("%d forks in %.0f ms\n", len(f.Children), float64(took.Microseconds())/1e3)
	if f.Pause != "" {
		pause, err := time.ParseDuration(f.Pause)
		if err != nil {
			return fmt.Errorf("the daemon's answer: pause: %w", err)
		}
		text += fmt.Sprintf("the source stood still for %.1f ms\n", float64(pause.Microseconds())/1e3)
	}
	_, err := io.WriteString(w, text)
	return err
}
