package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/image"
)

// FanoutConfig configures Fanout.
type FanoutConfig struct {
	Guest
	// Image is an image in Images.
	Image  string
	Images *image.Store
	// Warmup is run once, before the snapshot, and Code in each fork. Cold is a shell
	// command that does the same work from the start.
	Warmup, Code, Cold string
	// Count is the number of forks. Parallel is how many are made at once.
	Count, Parallel int
}

// FanoutReport is the result of Fanout.
type FanoutReport struct {
	Engine   string `json:"engine"`
	Memory   uint64 `json:"memory_bytes"`
	Count    int    `json:"count"`
	Parallel int    `json:"parallel"`
	// All is the time from the first claim to the last answer. Each is the time from
	// a claim to its answer. Both are in milliseconds.
	All  float64 `json:"all_ms"`
	Each Summary `json:"each"`
	// Warm is one execution in the interpreter of a fork that has waited in the pool.
	// Fresh is one in a fork that was made for it. Cold is the command in a fork that
	// has waited.
	Warm  Summary `json:"warm"`
	Fresh Summary `json:"fresh"`
	Cold  Summary `json:"cold"`
	// Own is the median of the memory of one fork alone, after all have answered.
	Own uint64 `json:"own_bytes"`
}

// turns is how often Warm, Fresh and Cold are measured.
const turns = 5

// Fanout measures many forks of a warm interpreter at once, through all layers of the
// daemon.
func Fanout(ctx context.Context, cfg FanoutConfig) (_ FanoutReport, err error) {
	report := FanoutReport{Engine: string(cfg.Engine), Memory: cfg.Memory, Count: cfg.Count, Parallel: cfg.Parallel}
	f, err := newFanout(ctx, cfg)
	if err != nil {
		return report, errors.Join(fmt.Errorf("prepare the benchmark: %w", err), f.close())
	}
	defer func() { err = errors.Join(err, f.close()) }()
	var warm, fresh, cold []time.Duration
	evaluate := func(u sandbox.Session) error { return f.run(ctx, u) }
	for i := range turns {
		for _, kind := range []struct {
			name    string
			samples *[]time.Duration
			wait    int // how many sandboxes wait in the pool
			do      func(sandbox.Session) error
		}{
			{"warm", &warm, 1, evaluate},
			{"fresh", &fresh, 0, evaluate},
			{"cold", &cold, 1, func(u sandbox.Session) error { return execProgram(ctx, u.Agent(), "/bin/sh", "-c", cfg.Cold) }},
		} {
			if err := f.keep(ctx, kind.wait); err != nil {
				return report, err
			}
			took, err := f.one(ctx, fmt.Sprintf("%s-%d", kind.name, i), kind.do)
			if err != nil {
				return report, err
			}
			*kind.samples = append(*kind.samples, took)
		}
	}
	report.Warm, report.Fresh, report.Cold = Summarize(warm), Summarize(fresh), Summarize(cold)
	if err := f.keep(ctx, 0); err != nil {
		return report, err
	}
	return report, f.all(ctx, &report)
}

// fanout is a pool of warm sandboxes.
type fanout struct {
	*benchNode
	cfg FanoutConfig
}

func newFanout(ctx context.Context, cfg FanoutConfig) (*fanout, error) {
	n, err := newNode(ctx, nodeConfig{
		Image: cfg.Image, Images: cfg.Images, Memory: cfg.Memory, Folder: cfg.Folder, Engine: cfg.Engine, Jail: cfg.Jail,
		Warmup: &sandbox.Program{Language: "python", Text: cfg.Warmup},
	})
	return &fanout{n, cfg}, err
}

// run runs the code.
func (f *fanout) run(ctx context.Context, u sandbox.Session) error {
	st, err := u.Agent().RunCode(ctx, guestrpc.CodeRunRequest{Source: f.cfg.Code}, io.Discard, io.Discard, nil)
	if err == nil && st.State != guestrpc.CodeOK {
		err = fmt.Errorf("the code exited with %d", st.Code)
	}
	return err
}

// all makes many forks. They stay alive until all have answered.
func (f *fanout) all(ctx context.Context, report *FanoutReport) error {
	var mu sync.Mutex // protects all following variables
	var each []time.Duration
	var errs []error
	free := make(chan struct{}, f.cfg.Parallel)
	var wg sync.WaitGroup
	begin := time.Now()
	for i := range f.cfg.Count {
		free <- struct{}{}
		wg.Go(func() {
			defer func() { <-free }()
			start := time.Now()
			_, err := f.use(ctx, fmt.Sprintf("fork-%d", i), func(u sandbox.Session) error { return f.run(ctx, u) })
			mu.Lock()
			defer mu.Unlock()
			each, errs = append(each, time.Since(start)), append(errs, err)
		})
	}
	wg.Wait()
	report.All = float64(time.Since(begin).Microseconds()) / 1e3
	if err := errors.Join(errs...); err != nil {
		return err
	}
	var own []uint64
	for i := range f.cfg.Count {
		name := fmt.Sprintf("fork-%d", i)
		bytes, err := f.own(ctx, name)
		_, killErr := f.manager.Kill(ctx, benchKey(name))
		if err := errors.Join(err, killErr); err != nil {
			return err
		}
		own = append(own, bytes)
	}
	slices.Sort(own)
	report.Each, report.Own = Summarize(each), own[len(own)/2]
	return nil
}

// own is the memory of a fork alone.
func (f *fanout) own(ctx context.Context, name string) (uint64, error) {
	u, err := f.manager.Use(ctx, benchKey(name))
	if err != nil {
		return 0, err
	}
	defer u.Close()
	st, err := u.Stats(ctx)
	return st.Own, err
}

// Print writes the report as a table.
func (r FanoutReport) Print(w io.Writer) error {
	fmt.Fprintf(w, "%d forks of a warm interpreter on %s, %d MiB, %d at once; milliseconds\n", r.Count, r.Engine, r.Memory>>20, r.Parallel)
	fmt.Fprintf(w, "all have answered after %.0f ms, %.1f ms a fork; %.1f MiB of its own each\n", r.All, r.All/float64(r.Count), float64(r.Own)/(1<<20))
	return printTable(w, r.Warm, []row{
		{"one execution in the warm kernel of a fork that has waited", r.Warm}, {"the same in a fork that was made for it", r.Fresh},
		{"the same by a new interpreter in a fork that has waited", r.Cold}, {"claim and execution, many at once", r.Each},
	})
}
