// Package ready keeps sandboxes of a snapshot waiting: forked, their identity
// renewed, having answered and been claimed before (so that the faults of a first
// answer and of a first claim are behind them), and paused. A claim gives one of
// them another identity and lets it run, which takes about as long as a request to
// a running sandbox. Claims beyond those that wait are forks.
package ready

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/stock"
	"agentrun.dev/internal/storage/snapshot"
)

// Engine is what a pool needs of an engine.
type Engine interface {
	Fork(context.Context, *snapshot.Snapshot, engine.ForkOptions) (engine.Sandbox, error)
}

// Config describes a pool.
type Config struct {
	Engine Engine
	// Snapshot is forked again and again. The caller closes it, after the pool.
	Snapshot *snapshot.Snapshot
	// Count is how many sandboxes wait.
	Count int
	// Shells is how many forks, for claims beyond those that wait and to replace
	// them, are half made. An engine that cannot do that makes none.
	Shells int
	// Options are those of the next sandbox; nil uses none. It is called for
	// each sandbox that is made, and again for each claim that finds none.
	Options func() engine.ForkOptions
	// Turn is waited for before each rehearsal of a sandbox that is going to wait;
	// release is called after it. So whoever has something more urgent to do than to
	// fill the pool waits for one rehearsal at most. nil rehearses at once. The Engine
	// sees to its forks itself.
	Turn func(context.Context) (release func(), err error)
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
	shells engine.Shells // nil without any
	stock  *stock.Stock[engine.Sandbox]

	mu              sync.Mutex // protects all following fields
	claimed, forked uint64
}

// New makes a pool and fills it in the background.
func New(cfg Config) (*Pool, error) {
	if cfg.Options == nil {
		cfg.Options = func() engine.ForkOptions { return engine.ForkOptions{} }
	}
	if cfg.Turn == nil {
		cfg.Turn = func(context.Context) (func(), error) { return func() {}, nil }
	}
	p := &Pool{cfg: cfg}
	if ahead, ok := cfg.Engine.(engine.Ahead); ok && cfg.Shells > 0 {
		var err error
		if p.shells, err = ahead.KeepShells(cfg.Snapshot, cfg.Shells); err != nil {
			return nil, fmt.Errorf("make a pool: %w", err)
		}
	}
	p.stock = stock.New(stock.Config[engine.Sandbox]{What: "ready sandboxes", Count: cfg.Count, Make: p.park})
	return p, nil
}

// Close ends the sandboxes that wait. Those that were claimed are not touched.
func (p *Pool) Close() error {
	err := p.stock.Close()
	if p.shells != nil {
		err = errors.Join(err, p.shells.Close())
	}
	return err
}

// Stats describes the pool as it is now.
func (p *Pool) Stats() Stats {
	s := p.stock.Stats()
	p.mu.Lock()
	defer p.mu.Unlock()
	return Stats{
		Ready: s.Waiting, Claimed: p.claimed, Forked: p.forked,
		Lost: s.Lost, Failed: s.Failed, LastError: s.LastError,
	}
}

// WaitFull waits until all sandboxes of the pool are there.
func (p *Pool) WaitFull(ctx context.Context) error { return p.stock.WaitFull(ctx) }

// Resize changes how many sandboxes wait. What is too many ends.
func (p *Pool) Resize(count int) { p.stock.Resize(count) }

// Hold keeps the pool from making sandboxes until release is called: claims then
// have the machine to themselves.
func (p *Pool) Hold() (release func()) { return p.stock.Hold() }

// Claim returns a sandbox with an identity of its own, which runs and has
// answered. hostname is its host name; empty leaves the choice to the engine.
func (p *Pool) Claim(ctx context.Context, hostname string) (engine.Sandbox, error) {
	for {
		sb, ok := p.stock.Take()
		if !ok {
			break
		}
		err := sb.Claim(ctx, hostname)
		p.stock.Refill() // not before: to make the next one would slow this one down
		if err == nil {
			p.count(&p.claimed)
			return sb, nil
		}
		err = errors.Join(err, sb.Close())
		if ctx.Err() != nil {
			return nil, fmt.Errorf("claim a ready sandbox: %w", err)
		}
		p.stock.Refuse(err)
	}
	p.count(&p.forked)
	opts := p.cfg.Options()
	opts.Hostname = hostname
	return p.cfg.Engine.Fork(ctx, p.cfg.Snapshot, opts)
}

func (p *Pool) count(n *uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	*n++
}

// rehearsals is how often a sandbox is claimed before it waits. The first claim of
// a process takes twice as long as its third, which still takes a tenth longer than
// its sixth where memory is mapped ahead.
const rehearsals = 5

// park makes a sandbox that waits.
func (p *Pool) park(ctx context.Context) (engine.Sandbox, error) {
	sb, err := p.cfg.Engine.Fork(ctx, p.cfg.Snapshot, p.cfg.Options())
	if err != nil {
		return nil, err
	}
	// What a fork does beside its first answer goes before this one.
	if err = sb.Agent().Ping(ctx); err == nil {
		err = sb.Park(ctx)
	}
	for i := 0; err == nil && i < rehearsals; i++ {
		err = p.rehearse(ctx, sb)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("park a sandbox: %w", err), sb.Close())
	}
	return sb, nil
}

// rehearse claims a sandbox that is parked, and parks it again.
func (p *Pool) rehearse(ctx context.Context, sb engine.Sandbox) error {
	release, err := p.cfg.Turn(ctx)
	if err != nil {
		return err
	}
	defer release()
	if err := sb.Claim(ctx, ""); err != nil {
		return err
	}
	return sb.Park(ctx)
}
