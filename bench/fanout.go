package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/guestrpc"
	"agentrun.dev/internal/image"
	"agentrun.dev/internal/sandbox"
)

// FanoutConfig says what Fanout measures.
type FanoutConfig struct {
	// Image is one of Images.
	Image  string
	Images *image.Store
	// Warmup is run once, before the snapshot; Code in each fork; Cold is a shell
	// command that does the same from the start.
	Warmup, Code, Cold string
	// Count is how many forks, Parallel how many at once.
	Count, Parallel int
	Memory          uint64
	Folder          string
	Engine          pick.Kind
	Jail            microvm.JailPolicy
}

// FanoutReport is what it found.
type FanoutReport struct {
	Engine   string `json:"engine"`
	Memory   uint64 `json:"memory_bytes"`
	Count    int    `json:"count"`
	Parallel int    `json:"parallel"`
	// All is from the first claim until the last answer, in milliseconds; Each
	// is from a claim until its answer.
	All  float64 `json:"all_ms"`
	Each Summary `json:"each"`
	// Warm is one execution in the kernel of a fork that has not been used, Cold
	// the command in such a fork.
	Warm Summary `json:"warm"`
	Cold Summary `json:"cold"`
	// Own is the memory of one fork alone, the median, when all have answered.
	Own uint64 `json:"own_bytes"`
}

// pairs is how often Warm and Cold are measured.
const pairs = 5

// Fanout measures many forks of a warm interpreter at once, through all that the
// daemon does.
func Fanout(ctx context.Context, cfg FanoutConfig) (_ FanoutReport, err error) {
	report := FanoutReport{Engine: string(cfg.Engine), Memory: cfg.Memory, Count: cfg.Count, Parallel: cfg.Parallel}
	f, err := newFanout(ctx, cfg)
	if err != nil {
		return report, errors.Join(fmt.Errorf("prepare the benchmark: %w", err), f.close())
	}
	defer func() { err = errors.Join(err, f.close()) }()
	var warm, cold []time.Duration
	for i := range pairs {
		for list, do := range map[*[]time.Duration]func(*sandbox.Use) error{
			&warm: func(u *sandbox.Use) error { return f.run(ctx, u) },
			&cold: func(u *sandbox.Use) error { return execProgram(ctx, u.Agent(), "/bin/sh", "-c", cfg.Cold) },
		} {
			took, err := f.one(ctx, fmt.Sprintf("pair-%d-%t", i, list == &warm), do)
			if err != nil {
				return report, err
			}
			*list = append(*list, took)
		}
	}
	report.Warm, report.Cold = Summarize(warm), Summarize(cold)
	return report, f.all(ctx, &report)
}

// fanout is a pool of warm sandboxes.
type fanout struct {
	*node
	cfg FanoutConfig
}

func newFanout(ctx context.Context, cfg FanoutConfig) (*fanout, error) {
	n, err := newNode(ctx, nodeConfig{
		Image: cfg.Image, Images: cfg.Images, Memory: cfg.Memory, Folder: cfg.Folder, Engine: cfg.Engine, Jail: cfg.Jail,
		Warmup: &sandbox.Program{Language: "python", Text: cfg.Warmup},
	})
	return &fanout{n, cfg}, err
}

// run evaluates the code.
func (f *fanout) run(ctx context.Context, u *sandbox.Use) error {
	st, err := u.Agent().RunCode(ctx, guestrpc.CodeRunRequest{Source: f.cfg.Code}, io.Discard, io.Discard, nil)
	if err == nil && st.State != guestrpc.CodeOK {
		err = fmt.Errorf("the code exited with %d", st.Code)
	}
	return err
}

// all makes many forks, which stay until all have answered.
func (f *fanout) all(ctx context.Context, report *FanoutReport) error {
	var mu sync.Mutex // protects all following
	var each []time.Duration
	var errs []error
	turns := make(chan struct{}, f.cfg.Parallel)
	var wg sync.WaitGroup
	begin := time.Now()
	for i := range f.cfg.Count {
		turns <- struct{}{}
		wg.Go(func() {
			defer func() { <-turns }()
			start := time.Now()
			_, err := f.use(ctx, fmt.Sprintf("fork-%d", i), func(u *sandbox.Use) error { return f.run(ctx, u) })
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
	defer u.Done()
	st, err := u.Stats(ctx)
	return st.Own, err
}

// Print writes the report as a table.
func (r FanoutReport) Print(w io.Writer) error {
	fmt.Fprintf(w, "%d forks of a warm interpreter on %s, %d MiB, %d at once; milliseconds\n", r.Count, r.Engine, r.Memory>>20, r.Parallel)
	fmt.Fprintf(w, "all have answered after %.0f ms, %.1f ms a fork; %.1f MiB of its own each\n", r.All, r.All/float64(r.Count), float64(r.Own)/(1<<20))
	return printTable(w, r.Warm, []row{
		{"one execution in a fork's warm kernel", r.Warm}, {"the same by a new interpreter in a fork", r.Cold}, {"claim and execution, many at once", r.Each},
	})
}
