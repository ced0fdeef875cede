// Package ready keeps sandboxes of a snapshot waiting: forked, their identity
// renewed, having answered once (so that the faults of a first answer are
// behind them), and paused. A claim gives one of them another identity and lets
// it run, which takes about as long as a request to a running sandbox. Claims
// beyond those that wait are forks.
package ready

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/snapshot"
)

// Config describes a pool.
type Config struct {
	Engine engine.Engine
	// Snapshot is forked again and again. The caller closes it, after the pool.
	Snapshot *snapshot.Snapshot
	// Count is how many sandboxes wait.
	Count int
	// Options are those of the next sandbox; nil uses none. It is called for
	// each sandbox that is made, and again for each claim that finds none.
	Options func() engine.ForkOptions
}

// Stats describes a pool.
type Stats struct {
	// Ready is how many sandboxes wait now.
	Ready int `json:"ready"`
	// Claimed counts claims that got one of them, Forked those that did not.
	Claimed uint64 `json:"claimed"`
	Forked  uint64 `json:"forked"`
	// Lost counts sandboxes that ended while they waited.
	Lost uint64 `json:"lost"`
	// Failed counts attempts to make one, and LastError is why the last failed.
	Failed    uint64 `json:"failed"`
	LastError string `json:"last_error,omitempty"`
}

// Pool is a set of sandboxes that wait. Its methods are safe for concurrent
// use.
type Pool struct {
	cfg    Config
	cancel context.CancelFunc
	done   sync.WaitGroup
	missed chan struct{} // holds at most one notice that one is missing

	mu      sync.Mutex // protects all following fields
	parked  []*parked
	stats   Stats
	closed  bool
	holds   int           // while there are any, no sandbox is made
	changed chan struct{} // closed and made anew with each change of the above
}

// parked is a sandbox that waits.
type parked struct {
	engine.Sandbox
	taken chan struct{} // closed when it does not wait any more
}

// New makes a pool and fills it in the background.
func New(cfg Config) *Pool {
	if cfg.Options == nil {
		cfg.Options = func() engine.ForkOptions { return engine.ForkOptions{} }
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &Pool{cfg: cfg, cancel: cancel, missed: make(chan struct{}, 1), changed: make(chan struct{})}
	p.done.Go(func() { p.fill(ctx) })
	return p
}

// Close ends the sandboxes that wait. Those that were claimed are not touched.
func (p *Pool) Close() error {
	p.cancel()
	p.mu.Lock()
	p.closed = true
	left := p.parked
	p.parked = nil
	p.mu.Unlock()
	var errs []error
	for _, sb := range left {
		close(sb.taken)
		errs = append(errs, sb.Close())
	}
	p.done.Wait()
	return errors.Join(errs...)
}

// Stats describes the pool as it is now.
func (p *Pool) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.now()
}

// now describes the pool; the lock must be held.
func (p *Pool) now() Stats {
	s := p.stats
	s.Ready = len(p.parked)
	return s
}

// tell wakes those who wait for a change; the lock must be held.
func (p *Pool) tell() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// WaitFull waits until all sandboxes of the pool are there.
func (p *Pool) WaitFull(ctx context.Context) error {
	return p.wait(ctx, func(s Stats) bool { return s.Ready >= p.cfg.Count })
}

// wait waits until the pool is as it should be.
func (p *Pool) wait(ctx context.Context, good func(Stats) bool) error {
	for {
		p.mu.Lock()
		s, changed := p.now(), p.changed
		p.mu.Unlock()
		if good(s) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			if s.LastError != "" {
				return fmt.Errorf("wait for ready sandboxes: %w (the last one failed: %s)", ctx.Err(), s.LastError)
			}
			return fmt.Errorf("wait for ready sandboxes: %w", ctx.Err())
		}
	}
}

// Claim returns a sandbox with an identity of its own, which runs and has
// answered. hostname is its host name; empty leaves the choice to the engine.
func (p *Pool) Claim(ctx context.Context, hostname string) (engine.Sandbox, error) {
	for {
		sb := p.take()
		if sb == nil {
			break
		}
		err := sb.Claim(ctx, hostname)
		p.notice() // not before: to make the next one would slow this one down
		if err == nil {
			p.count(func(s *Stats) { s.Claimed++ })
			return sb.Sandbox, nil
		}
		err = errors.Join(err, sb.Close())
		if ctx.Err() != nil {
			return nil, fmt.Errorf("claim a ready sandbox: %w", err)
		}
		p.count(func(s *Stats) { s.Lost++; s.LastError = err.Error() })
	}
	p.count(func(s *Stats) { s.Forked++ })
	opts := p.cfg.Options()
	opts.Hostname = hostname
	return p.cfg.Engine.Fork(ctx, p.cfg.Snapshot, opts)
}

func (p *Pool) count(change func(*Stats)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change(&p.stats)
	p.tell()
}

// take removes a sandbox from the pool: the one that waits for the longest, as
// it has settled the most.
func (p *Pool) take() *parked {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.parked) == 0 {
		return nil
	}
	sb := p.parked[0]
	p.parked = append(p.parked[:0:0], p.parked[1:]...)
	close(sb.taken)
	return sb
}

// notice makes fill look again.
func (p *Pool) notice() {
	select {
	case p.missed <- struct{}{}:
	default:
	}
}

// Attempts that fail are repeated after a while that doubles.
const (
	firstBackoff = 50 * time.Millisecond
	lastBackoff  = 10 * time.Second
)

// fill makes one sandbox after the other, until there are enough.
func (p *Pool) fill(ctx context.Context) {
	backoff := firstBackoff
	for {
		for p.missing() {
			err := p.add(ctx)
			if ctx.Err() != nil {
				return
			}
			if err == nil {
				backoff = firstBackoff
				continue
			}
			p.count(func(s *Stats) { s.Failed++; s.LastError = err.Error() })
			select {
			case <-time.After(backoff):
			case <-ctx.Done():
				return
			}
			backoff = min(2*backoff, lastBackoff)
		}
		select {
		case <-p.missed:
		case <-ctx.Done():
			return
		}
	}
}

func (p *Pool) missing() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.holds == 0 && len(p.parked) < p.cfg.Count
}

// Hold keeps the pool from making sandboxes until release is called: claims
// then have the machine to themselves. One that is being made is completed.
func (p *Pool) Hold() (release func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.holds++
	return sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.holds--
		p.notice()
	})
}

// add makes a sandbox and parks it.
func (p *Pool) add(ctx context.Context) error {
	sb, err := p.cfg.Engine.Fork(ctx, p.cfg.Snapshot, p.cfg.Options())
	if err != nil {
		return err
	}
	// What a fork does beside its first answer goes before this one.
	if err = sb.Agent().Ping(ctx); err == nil {
		err = sb.Pause(ctx)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("park a sandbox: %w", err), sb.Close())
	}
	w := &parked{sb, make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return sb.Close()
	}
	p.parked = append(p.parked, w)
	p.tell()
	p.done.Go(func() { p.watch(w) })
	return nil
}

// watch replaces a sandbox that ends while it waits.
func (p *Pool) watch(w *parked) {
	select {
	case <-w.taken:
		return
	case <-w.Done():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, other := range p.parked {
		if other == w {
			p.parked = append(p.parked[:i:i], p.parked[i+1:]...)
			p.stats.Lost++
			p.stats.LastError = w.Wait().Error()
			p.notice()
			p.tell()
			break
		}
	}
	_ = w.Close() // it has ended; this frees what is left of it
}
