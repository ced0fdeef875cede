package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"agentrun.dev/internal/engine/pool"
	"agentrun.dev/internal/storage/snapshot"
)

// ReadyConfig describes a pool of ready sandboxes.
type ReadyConfig[S Sandbox] struct {
	// Count is how many of them wait.
	Count int
	// Fork forks a sandbox that is going to wait. The pool makes it ready.
	Fork func(context.Context) (S, error)
	// Now forks a sandbox for a claim that finds none waiting.
	Now func(ctx context.Context, hostname string) (S, error)
	// Turn is waited for before each rehearsal of a claim, and release called after
	// it. So whoever has something more urgent to do waits for one rehearsal at most.
	// nil rehearses at once.
	Turn func(context.Context) (release func(), err error)
}

// KeepReady keeps sandboxes ready. A claim asks the pool for one by the host name to
// give it; empty leaves the choice to the engine.
func KeepReady[S Sandbox](cfg ReadyConfig[S]) *pool.Pool[S, string] {
	return pool.New(pool.Config[S, string]{
		What: "ready sandboxes", Count: cfg.Count,
		Make: func(ctx context.Context) (S, error) {
			sb, err := cfg.Fork(ctx)
			if err != nil {
				return sb, err
			}
			return sb, makeReady(ctx, sb, cfg.Turn)
		},
		Claim: func(ctx context.Context, sb S, hostname string) error { return sb.Claim(ctx, hostname) },
		Now:   cfg.Now,
	})
}

// KeepForksReady keeps forks of a snapshot ready that need nothing but their engine.
func KeepForksReady(e Engine, snap *snapshot.Snapshot, count int) *pool.Pool[Sandbox, string] {
	fork := func(ctx context.Context, hostname string) (Sandbox, error) {
		return e.Fork(ctx, snap, ForkOptions{Hostname: hostname})
	}
	return KeepReady(ReadyConfig[Sandbox]{
		Count: count,
		Fork:  func(ctx context.Context) (Sandbox, error) { return fork(ctx, "") },
		Now:   fork,
	})
}

// rehearsals is how often a sandbox is claimed before it waits. The first claim of
// a process takes twice as long as its third, which still takes a tenth longer than
// its sixth where memory is mapped ahead.
const rehearsals = 5

// makeReady makes a fork a ready sandbox: one that has answered, was claimed before,
// so that the page faults of a first answer and of a first claim are behind it, and is
// parked. To claim it takes about as long as a request to a running sandbox. An error
// ends the fork. turn is that of a ReadyConfig.
func makeReady(ctx context.Context, sb Sandbox, turn func(context.Context) (release func(), err error)) error {
	// What a fork does beside its first answer goes before this one.
	err := ping(ctx, sb)
	if err == nil {
		err = sb.Park(ctx)
	}
	for i := 0; err == nil && i < rehearsals; i++ {
		err = rehearseClaim(ctx, sb, turn)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("park a sandbox: %w", err), sb.Close())
	}
	return nil
}

// pingPatience is how long a fork may take to answer again.
const pingPatience = time.Minute

func ping(ctx context.Context, sb Sandbox) error {
	ctx, cancel := context.WithTimeout(ctx, pingPatience)
	defer cancel()
	return sb.Agent().Ping(ctx)
}

// rehearseClaim claims a sandbox that is parked, and parks it again.
func rehearseClaim(ctx context.Context, sb Sandbox, turn func(context.Context) (release func(), err error)) error {
	if turn != nil {
		release, err := turn(ctx)
		if err != nil {
			return err
		}
		defer release()
	}
	if err := sb.Claim(ctx, ""); err != nil {
		return err
	}
	return sb.Park(ctx)
}

// KeepSpares keeps spares on an engine that can, and none on others.
func KeepSpares(e Engine, snap *snapshot.Snapshot, count int) (Spares, error) {
	if ahead, ok := e.(Ahead); ok {
		return ahead.KeepSpares(snap, count)
	}
	return noSpares{}, nil
}

// noSpares are those of an engine that makes nothing ahead.
type noSpares struct{}

func (noSpares) WaitFull(context.Context) error { return nil }
func (noSpares) Stats() SpareStats              { return SpareStats{} }
func (noSpares) Close() error                   { return nil }
