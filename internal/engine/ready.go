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
	// Count is how many sandboxes wait.
	Count int
	// Fork forks a sandbox that will wait. The pool makes it ready.
	Fork func(context.Context) (S, error)
	// Now forks a sandbox for a claim when no sandbox waits.
	Now func(ctx context.Context, hostname string) (S, error)
	// Turn is called before each rehearsal of a claim, and may block; its release is
	// called after the rehearsal. A caller with more urgent work so waits for one
	// rehearsal at most. With nil the pool rehearses at once.
	Turn func(context.Context) (release func(), err error)
}

// KeepReady keeps sandboxes ready. A claim asks the pool for a sandbox with a given
// host name; if that is empty, the engine chooses one.
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

// KeepForksReady keeps forks of a snapshot ready. It needs only their engine.
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

// rehearsals is how often a sandbox is claimed before it waits. The first claim of a
// process takes twice as long as its third. Where memory is mapped ahead, the third
// still takes a tenth longer than the sixth.
const rehearsals = 5

// makeReady turns a fork into a ready sandbox. The fork answers once and is claimed
// several times, so that the page faults of a first answer and a first claim are
// behind it. Then it is parked. Claiming a ready sandbox takes about as long as a
// request to a running one. An error ends the fork. turn is the Turn of a
// ReadyConfig.
func makeReady(ctx context.Context, sb Sandbox, turn func(context.Context) (release func(), err error)) error {
	// The fork finishes the work that comes with its first answer before it answers
	// this ping.
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

// rehearseClaim claims a parked sandbox and parks it again.
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

// KeepSpares keeps spares on an engine that can make them. On other engines it keeps
// an empty set.
func KeepSpares(e Engine, snap *snapshot.Snapshot, count int) (Spares, error) {
	if ahead, ok := e.(Ahead); ok {
		return ahead.KeepSpares(snap, count)
	}
	return noSpares{}, nil
}

// noSpares is the empty set of spares of an engine that makes nothing ahead.
type noSpares struct{}

func (noSpares) WaitFull(context.Context) error { return nil }
func (noSpares) Stats() SpareStats              { return SpareStats{} }
func (noSpares) Close() error                   { return nil }
