package node

import (
	"context"
	"errors"
	"fmt"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// DeleteTemplate deletes a template that no pool uses, and its builds.
func (m *Manager) DeleteTemplate(ctx context.Context, k sandbox.Key) error {
	if err := m.begin(); err != nil {
		return err
	}
	err := m.db.Update(func(tx *journal.Tx) error {
		if _, found, err := templates.Get(tx, k.String()); err != nil || !found {
			return errors.Join(err, sandbox.NotFound(sandbox.KindTemplate, k))
		}
		err := pools.Each(tx, string(k.Namespace)+"/", func(_ string, p sandbox.Pool) error {
			if p.Spec.Template == k.Name {
				return sandbox.Errorf(sandbox.CodeConflict, "template %s is in use", k.Name).
					Because("pool %s keeps sandboxes of it", p.Name).Try("Delete the pool first")
			}
			return nil
		})
		if err != nil {
			return err
		}
		return templates.Delete(tx, k.String())
	})
	if err != nil {
		return err
	}
	m.mu.Lock()
	var running []*build
	for bk, run := range m.builds {
		if bk.Template == k {
			running = append(running, run)
		}
	}
	m.mu.Unlock()
	for _, run := range running {
		run.cancel()
		select {
		case <-run.done:
		case <-ctx.Done(): // whoever deletes something next collects what is left
			return fmt.Errorf("end the builds of template %s: %w", k.Name, ctx.Err())
		}
	}
	return m.collectBuilds()
}

// DeleteFork ends the children of a fork that are left, and forgets the fork.
func (m *Manager) DeleteFork(ctx context.Context, k sandbox.Key) error {
	if err := m.begin(); err != nil {
		return err
	}
	f, err := m.ForkOf(ctx, k)
	if err != nil {
		return err
	}
	for _, c := range f.Children {
		m.mu.Lock()
		b := m.roster.byID[c.ID]
		m.mu.Unlock()
		if b == nil {
			continue
		}
		if err := b.lockToEnd(ctx); err != nil {
			return err
		}
		if b.now().State != sandbox.Ended {
			err = b.ended(sandbox.ReasonKilled, "its fork was deleted")
		}
		b.unlock()
		if err != nil {
			return err
		}
	}
	return m.db.Update(func(tx *journal.Tx) error { return forks.Delete(tx, k.String()) })
}
