package bench

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// walls makes forks against the wall clock. For each number it starts anew, and keeps
// all forks alive until the last one has answered.
func walls(ctx context.Context, cfg ForkConfig, fork func(context.Context) (end func() error, err error)) ([]Wall, error) {
	var out []Wall
	for _, n := range cfg.Walls {
		ends := make([]func() error, n)
		begin := time.Now()
		err := inParallel(n, cfg.Parallel, func(i int) (err error) {
			ends[i], err = fork(ctx)
			return err
		})
		took := time.Since(begin)
		err = errors.Join(err, undoAll(slices.DeleteFunc(ends, func(end func() error) bool { return end == nil })))
		if err != nil {
			return out, err
		}
		out = append(out, Wall{Forks: n, Parallel: cfg.Parallel, MS: float64(took.Nanoseconds()) / 1e6})
	}
	return out, nil
}

// inParallel calls do n times, with several calls at once, until one fails.
func inParallel(n, workers int, do func(i int) error) error {
	var next atomic.Int64
	var failed atomic.Bool
	errs := make([]error, n)
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= n || failed.Load() {
					return
				}
				if errs[i] = do(i); errs[i] != nil {
					failed.Store(true)
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// undoAll calls all functions, the last one first.
func undoAll(undo []func() error) error {
	var errs []error
	for _, f := range slices.Backward(undo) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}
