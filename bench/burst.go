package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"agentrun.dev/internal/sandbox"
)

// BurstReport measures many claims of one pool of the manager twice: first one after
// the other, then all at once. No sandbox ends before the last claim is answered, and
// the pool is full before each of the two parts.
type BurstReport struct {
	Claims int       `json:"claims"`
	Ready  int       `json:"ready"`
	Row    BurstSide `json:"in_a_row"`
	AtOnce BurstSide `json:"at_once"`
}

// BurstSide is the result of one part.
type BurstSide struct {
	// All is the time from the first call to the last answer, in milliseconds.
	All float64 `json:"all_ms"`
	// Each is the time of a claim from its call.
	Each Summary `json:"each"`
	// Forked is how many claims found no waiting sandbox.
	Forked uint64 `json:"forked"`
}

// Ratio is the time of the claims at once, relative to that of the claims in a row.
func (r *BurstReport) Ratio() float64 { return r.AtOnce.All / r.Row.All }

// Median is the part of the whole time that the median claim waits, at once. It is
// about half if claims are answered one after the other, and all of it if they are
// answered together in the end.
func (r *BurstReport) Median() float64 { return r.AtOnce.Each.P50 / r.AtOnce.All }

func (r *BurstReport) print(w io.Writer) {
	fmt.Fprintf(w, "%d claims of a pool of %d, through the manager; milliseconds\n", r.Claims, r.Ready)
	for _, side := range []struct {
		name string
		BurstSide
	}{{"in a row", r.Row}, {"at once", r.AtOnce}} {
		fmt.Fprintf(w, "  %-8s  all %.0f, each p50 %.1f, p99 %.1f; %d by a fork\n", side.name, side.All, side.Each.P50, side.Each.P99, side.Forked)
	}
	fmt.Fprintf(w, "at once takes %.2f times as long as in a row (goal 1.3); its median claim %.2f of the whole (goal 0.6)\n", r.Ratio(), r.Median())
}

// burst makes claims in a row, and then as many at once.
func burst(ctx context.Context, from ForkConfig, cfg ClaimConfig) (_ *BurstReport, err error) {
	count := &forkedClaims{Observer: sandbox.Observers()}
	node, err := newNode(ctx, nodeConfig{
		Root: &rootTemplate{from}, Image: "root", Memory: from.Memory, Folder: from.Folder, Engine: from.engine(), Jail: from.Jail,
		Observer: count, Starts: cfg.Starts,
	})
	defer func() { err = errors.Join(err, node.close()) }()
	if err != nil {
		return nil, fmt.Errorf("prepare the burst: %w", err)
	}
	r := &BurstReport{Claims: cfg.Burst, Ready: cfg.Ready}
	for _, side := range []struct {
		name string
		out  *BurstSide
		run  func(n int, do func(i int))
	}{
		{"row", &r.Row, func(n int, do func(int)) {
			for i := range n {
				do(i)
			}
		}},
		{"burst", &r.AtOnce, func(n int, do func(int)) {
			var all sync.WaitGroup
			for i := range n {
				all.Go(func() { do(i) })
			}
			all.Wait()
		}},
	} {
		if err := node.keep(ctx, cfg.Ready); err != nil {
			return nil, err
		}
		before := count.n.Load()
		if err := side.out.measure(ctx, node, side.name, cfg.Burst, side.run); err != nil {
			return nil, fmt.Errorf("%d claims, %s: %w", cfg.Burst, side.name, err)
		}
		side.out.Forked = count.n.Load() - before
	}
	return r, nil
}

// measure makes n claims with run, pings their sandboxes, and ends them.
func (s *BurstSide) measure(ctx context.Context, node *benchNode, name string, n int, run func(n int, do func(i int))) error {
	took, errs := make([]time.Duration, n), make([]error, n)
	key := func(i int) sandbox.Key { return benchKey(fmt.Sprintf("%s-%d", name, i)) }
	start := time.Now()
	run(n, func(i int) {
		begin := time.Now()
		_, _, errs[i] = node.manager.Claim(ctx, sandbox.ClaimRequest{Key: key(i), Spec: sandbox.ClaimSpec{Pool: benchPool}})
		took[i] = time.Since(begin)
	})
	s.All = float64(time.Since(start).Nanoseconds()) / 1e6
	s.Each = Summarize(took)
	for i := range n {
		if errs[i] == nil {
			errs[i] = node.end(ctx, key(i))
		}
	}
	return errors.Join(errs...)
}

// end ends a sandbox. The sandbox must still answer.
func (n *benchNode) end(ctx context.Context, k sandbox.Key) error {
	u, err := n.manager.Use(ctx, k)
	if err == nil {
		err = u.Agent().Ping(ctx)
		u.Close()
	}
	_, killErr := n.manager.Kill(ctx, k)
	return errors.Join(err, killErr)
}

// forkedClaims counts claims that found no waiting sandbox.
type forkedClaims struct {
	sandbox.Observer
	n atomic.Uint64
}

func (c *forkedClaims) Begin(ctx context.Context, w sandbox.Work) (context.Context, func(sandbox.Outcome)) {
	return ctx, func(out sandbox.Outcome) {
		if w.Op == sandbox.OpClaim && out.Err == nil && !out.Waited {
			c.n.Add(1)
		}
	}
}
