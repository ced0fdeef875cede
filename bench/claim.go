package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/pool"
)

// ClaimConfig configures Claim.
type ClaimConfig struct {
	Guest
	// Program is a program of the root filesystem that does nothing.
	Program string
	// Count is how many claims are made one after the other. Ready is how many
	// sandboxes wait. Burst is how many claims a burst has; 0 makes no burst.
	Count, Ready, Burst int
	// Spares is how many spares wait, for claims that find no waiting sandbox. The
	// burst has as many spares as a daemon's pool.
	Spares int
	// Starts is how many machines are started at once in the burst; with 0 the
	// manager decides.
	Starts int
	// Warm is the Warm of a ForkConfig.
	Warm string
}

// ClaimReport is the result of Claim. Times are from the call.
type ClaimReport struct {
	Engine string  `json:"engine"`
	Memory uint64  `json:"memory_bytes"`
	VCPUs  int     `json:"vcpus"`
	Ready  int     `json:"ready"`
	Spares int     `json:"shells"`
	Floor  Summary `json:"floor"`
	// Ping is a warm ping, to compare a claim with: a claim returns when the
	// sandbox's agent has confirmed its new identity. Claims and pings alternate, and
	// no sandbox is made meanwhile.
	Ping  Summary `json:"warm_ping"`
	Claim Summary `json:"claim"`
	// Burst is the result of many claims at once, through the manager; nil without a
	// burst.
	Burst *BurstReport `json:"burst,omitempty"`
	Noisy bool         `json:"noisy"`
}

// Claim measures claims of ready sandboxes: one by one from a pool without a manager,
// then a burst of them through the manager.
func Claim(ctx context.Context, cfg ClaimConfig) (_ ClaimReport, err error) {
	report := ClaimReport{Memory: cfg.Memory, VCPUs: cfg.VCPUs, Ready: cfg.Ready, Spares: cfg.Spares}
	from := ForkConfig{Guest: cfg.Guest, Program: cfg.Program, Warm: cfg.Warm}
	report.Engine = string(from.engine())
	if cfg.Count > 0 {
		if err := report.oneByOne(ctx, cfg, from); err != nil {
			return report, err
		}
	}
	if cfg.Burst > 0 {
		report.Burst, err = burst(ctx, from, cfg)
	}
	return report, err
}

// oneByOne measures single claims while no sandbox is made.
func (r *ClaimReport) oneByOne(ctx context.Context, cfg ClaimConfig, from ForkConfig) (err error) {
	source, err := newForkSource(ctx, from)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, source.close()) }()
	spares, err := engine.KeepSpares(source.engine, source.snap, cfg.Spares)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, spares.Close()) }()
	ready := engine.KeepForksReady(source.engine, source.snap, cfg.Ready)
	defer func() { err = errors.Join(err, ready.Close()) }()
	floor, err := floorOf(from.engine(), cfg.Root, cfg.Warm)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, floor.Close()) }()

	var s claimSamples
	for len(s.claims) < cfg.Count {
		if err := ready.WaitFull(ctx); err != nil {
			return err
		}
		if err := s.row(ctx, ready, floor, max(1, min(cfg.Ready, cfg.Count-len(s.claims)))); err != nil {
			return err
		}
	}
	r.Floor, r.Claim, r.Ping = Summarize(s.floors), Summarize(s.claims), Summarize(s.pings)
	r.Noisy = r.Floor.Noisy()
	return nil
}

type claimSamples struct{ floors, pings, claims []time.Duration }

// row makes n claims one after the other. With each claim it pings the sandbox that
// was claimed before. No sandbox is made meanwhile. The measurement right after the
// floor finds caches that another machine has filled. So claim and ping take turns at
// that place.
func (s *claimSamples) row(ctx context.Context, ready *pool.Pool[engine.Sandbox, string], floor sampler, n int) (err error) {
	release := ready.Hold()
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
		sb, err := ready.Get(ctx, "")
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

// Print writes the report as a table.
func (r ClaimReport) Print(w io.Writer) error {
	if r.Claim.N > 0 {
		fmt.Fprintf(w, "claims of %d ready sandboxes, %d spares, %d MiB, %d vCPU; milliseconds\n", r.Ready, r.Spares, r.Memory>>20, r.VCPUs)
		err := printTable(w, r.Floor, []row{{"floor", r.Floor}, {"warm ping", r.Ping}, {"claim", r.Claim}})
		if err != nil {
			return err
		}
	}
	if r.Ping.P50 > 0 {
		fmt.Fprintf(w, "a claim takes %.1f times as long as a warm ping\n", r.Claim.P50/r.Ping.P50)
	}
	if r.Burst != nil {
		r.Burst.print(w)
	}
	if r.Noisy {
		fmt.Fprintln(w, NoisyWarning)
	}
	return nil
}
