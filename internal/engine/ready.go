package engine

import (
	"context"
	"errors"
	"fmt"

	"agentrun.dev/internal/storage/snapshot"
)

// rehearsals is how often a sandbox is claimed before it waits. The first claim of
// a process takes twice as long as its third, which still takes a tenth longer than
// its sixth where memory is mapped ahead.
const rehearsals = 5

// MakeReady makes a fork a ready sandbox: one that has answered, was claimed before,
// so that the page faults of a first answer and of a first claim are behind it, and is
// parked. To claim it takes about as long as a request to a running sandbox. An error
// ends the fork.
//
// turn is waited for before each rehearsal of a claim, and release called after it. So
// whoever has something more urgent to do waits for one rehearsal at most. nil
// rehearses at once.
func MakeReady(ctx context.Context, sb Sandbox, turn func(context.Context) (release func(), err error)) error {
	// What a fork does beside its first answer goes before this one.
	err := sb.Agent().Ping(ctx)
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

// KeepShells keeps shells on an engine that can, and none on others.
func KeepShells(e Engine, snap *snapshot.Snapshot, count int) (Shells, error) {
	if ahead, ok := e.(Ahead); ok {
		return ahead.KeepShells(snap, count)
	}
	return noShells{}, nil
}

// noShells are those of an engine that makes nothing ahead.
type noShells struct{}

func (noShells) WaitFull(context.Context) error { return nil }
func (noShells) Stats() ShellStats              { return ShellStats{} }
func (noShells) Close() error                   { return nil }
