package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/engine/ready"
)

// ClaimConfig says what Claim measures.
type ClaimConfig struct {
	// Root is an EROFS image, Program a program in it that does nothing.
	Root, Program string
	Memory        uint64
	VCPUs         int
	// Count is how many claims are made one after the other, Ready how many
	// sandboxes wait, Burst how many claims are made at once.
	Count, Ready, Burst int
	// Shells is how many forks are half made, for when no sandbox waits.
	Shells int
	// Folder is for the snapshot and the sandboxes' disks.
	Folder string
	Jail   microvm.JailPolicy
	// Engine and Warm are as of a ForkConfig.
	Engine pick.Kind
	Warm   string
}

// ClaimReport is what it found. Times are from the call.
type ClaimReport struct {
	Engine string  `json:"engine"`
	Memory uint64  `json:"memory_bytes"`
	VCPUs  int     `json:"vcpus"`
	Ready  int     `json:"ready"`
	Shells int     `json:"shells"`
	Floor  Summary `json:"floor"`
	// Ping is a warm one, the measure of a claim: a claim returns when the
	// sandbox's agent has confirmed its new identity. They take turns, and no
	// sandbox is made meanwhile.
	Ping  Summary `json:"warm_ping"`
	Claim Summary `json:"claim"`
	// Burst is how long each of many claims at once took, BurstAll all of them;
	// Forked is how many of them found no sandbox waiting.
	Burst    Summary `json:"burst"`
	BurstAll float64 `json:"burst_all_ms"`
	Forked   uint64  `json:"burst_forked"`
	Noisy    bool    `json:"noisy"`
}

// Claim measures claims of ready sandboxes.
func Claim(ctx context.Context, cfg ClaimConfig) (_ ClaimReport, err error) {
	report := ClaimReport{Memory: cfg.Memory, VCPUs: cfg.VCPUs, Ready: cfg.Ready, Shells: cfg.Shells}
	from := ForkConfig{
		Root: cfg.Root, Program: cfg.Program, Memory: cfg.Memory, VCPUs: cfg.VCPUs, Folder: cfg.Folder, Jail: cfg.Jail,
		Engine: cfg.Engine, Warm: cfg.Warm,
	}
	source, err := newForkSource(ctx, from)
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, source.close()) }()
	report.Engine = string(from.engine())
	pool, err := ready.New(ready.Config{Engine: source.engine, Snapshot: source.snap, Count: cfg.Ready, Shells: cfg.Shells})
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, pool.Close()) }()
	floor, err := floorOf(from.engine(), cfg.Root, cfg.Warm)
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, floor.Close()) }()

	var s claimSamples
	for len(s.claims) < cfg.Count {
		if err := pool.WaitFull(ctx); err != nil {
			return report, err
		}
		if err := s.row(ctx, pool, floor, max(1, min(cfg.Ready, cfg.Count-len(s.claims)))); err != nil {
			return report, err
		}
	}
	report.Floor, report.Claim, report.Ping = Summarize(s.floors), Summarize(s.claims), Summarize(s.pings)
	report.Noisy = report.Floor.Noisy()
	if err := pool.WaitFull(ctx); err != nil {
		return report, err
	}
	return report, report.burst(ctx, pool, cfg.Burst)
}

type claimSamples struct{ floors, pings, claims []time.Duration }

// row makes n claims one after the other, with a ping of the sandbox that was
// claimed before it beside each, while no sandbox is made. What comes right after
// the floor finds caches that another machine has filled: that is the claim's turn
// and the ping's by turns.
func (s *claimSamples) row(ctx context.Context, pool *ready.Pool, floor sampler, n int) (err error) {
	release := pool.Hold()
	defer release()
	var warm engine.Sandbox
	defer func() {
		if warm != nil {
			err = errors.Join(err, warm.Close())
		}
	}()
	ping := func() (err error) {
		if warm != nil {
			s.pings, err = repeat(s.pings, 1, func() error { return warm.Agent().Ping(ctx) })
		}
		return err
	}
	for i := range n {
		d, err := floor.Sample()
		if err != nil {
			return err
		}
		s.floors = append(s.floors, d)
		if i%2 == 1 {
			if err := ping(); err != nil {
				return err
			}
		}
		start := time.Now()
		sb, err := pool.Claim(ctx, "")
		if err != nil {
			return err
		}
		s.claims = append(s.claims, time.Since(start))
		if i%2 == 0 {
			err = ping()
		}
		if warm != nil {
			err = errors.Join(err, warm.Close())
		}
		if warm = sb; err != nil {
			return err
		}
	}
	return nil
}

// burst makes n claims at once.
func (r *ClaimReport) burst(ctx context.Context, pool *ready.Pool, n int) error {
	before := pool.Stats().Forked
	var claims sync.WaitGroup
	took, errs := make([]time.Duration, n), make([]error, n)
	claimed := make([]engine.Sandbox, n)
	start := time.Now()
	for i := range n {
		claims.Go(func() {
			claimed[i], errs[i] = pool.Claim(ctx, "")
			took[i] = time.Since(start)
		})
	}
	claims.Wait()
	r.BurstAll = float64(time.Since(start).Nanoseconds()) / 1e6
	r.Burst, r.Forked = Summarize(took), pool.Stats().Forked-before
	for i, sb := range claimed {
		if sb != nil {
			errs[i] = errors.Join(sb.Agent().Ping(ctx), sb.Close())
		}
	}
	return errors.Join(errs...)
}

// Print writes the report as a table.
func (r ClaimReport) Print(w io.Writer) error {
	fmt.Fprintf(w, "claims of %d ready sandboxes, %d shells, %d MiB, %d vCPU; milliseconds\n", r.Ready, r.Shells, r.Memory>>20, r.VCPUs)
	err := printTable(w, r.Floor, []row{
		{"floor", r.Floor}, {"warm ping", r.Ping}, {"claim", r.Claim}, {"claims in a burst", r.Burst},
	})
	if err != nil {
		return err
	}
	if r.Ping.P50 > 0 {
		fmt.Fprintf(w, "a claim takes %.1f times as long as a warm ping\n", r.Claim.P50/r.Ping.P50)
	}
	fmt.Fprintf(w, "burst: %d claims in %.0f ms, %d of them by a fork\n", r.Burst.N, r.BurstAll, r.Forked)
	if r.Noisy {
		fmt.Fprintln(w, NoisyWarning)
	}
	return nil
}
