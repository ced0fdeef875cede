package node

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

// forkThrough forks a sandbox, and makes a checkpoint of the same instant; the caller has the
// sandbox's turn. The children are made of the checkpoint, which takes longer than a live fork.
// The sandbox keeps its state. One transaction writes everything that was made to the journal.
func (m *Manager) forkThrough(ctx context.Context, b *member, f *sandbox.Fork, spec sandbox.ForkSpec, also record[sandbox.Fork]) (err error) {
	last := b.now()
	egress, err := last.Egress.Narrowed(spec.NetworkPolicy)
	if err == nil {
		err = b.answers()
	}
	if err != nil {
		return err
	}
	ctx, end := m.observer.Begin(ctx, last.Work(sandbox.OpLiveFork))
	var out sandbox.Outcome
	defer func() {
		out.Err = err
		end(out)
	}()
	c, err := m.storeForFork(ctx, b, sandbox.Key{Namespace: f.Namespace, Name: spec.Checkpoint})
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.undoCheckpoint(c))
		}
	}()
	snap, held, err := m.openHeld(m.checkpointDir(c.ID), string(c.ID))
	if err != nil {
		return fmt.Errorf("fork sandbox %s: %w", last.Name, err)
	}
	defer func() { _ = snap.Close() }() // only read
	source := last
	source.Layers, egress.Lineage = held, nil // they belong to the children from now on
	children, refused := m.enlistChildren(source, egress, f, spec)
	if len(children) == 0 || refused != nil && spec.Atomic {
		m.dropChildren(children)
		return fmt.Errorf("none of the forks of %s could be made: %w", last.Name, refused)
	}
	made, failed := m.connectChildren(ctx, children, m.restoreChildren(ctx, snap, children, last), c.Of.Egress.Lineage)
	out.Failed, out.Children = len(children)-len(made), len(made)
	if len(made) == 0 {
		return fmt.Errorf("none of the forks of %s could be made: %w", last.Name, failed)
	}
	if err := m.settleFork(f, spec, made, failed); err != nil {
		return err
	}
	err = m.commitFork(b, last.Live, f, made, func(tx *journal.Tx, f sandbox.Fork) error {
		return errors.Join(checkpoints.Write(tx, c.String(), &c), also.write(tx, f))
	})
	if err != nil {
		m.dropChildren(made)
		return fmt.Errorf("fork sandbox %s: %w", last.Name, err)
	}
	for _, one := range made {
		one.attach(one.connected)
		one.unlock()
	}
	return nil
}

// storeForFork writes the checkpoint of a fork. It gives back the memory for that before the
// children are made.
func (m *Manager) storeForFork(ctx context.Context, b *member, k sandbox.Key) (sandbox.Checkpoint, error) {
	done, err := m.beginCheckpoint(ctx, b)
	if err != nil {
		return sandbox.Checkpoint{}, err
	}
	defer done()
	c, err := m.storeCheckpoint(ctx, b, k)
	return c.Checkpoint, err
}

// restoreChildren makes the machines of children from one snapshot, each in its
// turn.
func (m *Manager) restoreChildren(ctx context.Context, snap *snapshot.Snapshot, children []*child, source sandbox.Sandbox) *engine.LiveFork {
	out := &engine.LiveFork{Forks: make([]engine.Sandbox, len(children)), Errs: make([]error, len(children))}
	var all sync.WaitGroup
	for i, c := range children {
		all.Go(func() {
			release, err := m.turns.take(ctx, source.Namespace)
			if err != nil {
				out.Errs[i] = err
				return
			}
			defer release()
			out.Forks[i], out.Errs[i] = m.cfg.Engine.Fork(ctx, snap, engine.ForkOptions{
				Hostname: string(c.out.Name), Folder: m.machineDir(c.machine), Limits: engineLimits(source.Limits),
			})
		})
	}
	all.Wait()
	return out
}
