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
	ended, err := m.forgetTemplate(k)
	if err != nil {
		return err
	}
	for _, run := range ended {
		select {
		case <-run.done:
		case <-ctx.Done(): // it ends and cleans up by itself
			return fmt.Errorf("end the builds of template %s: %w", k.Name, ctx.Err())
		}
	}
	return m.collectBuilds()
}

// forgetTemplate takes a template and what is being built of it out of the journal and out
// of memory, and returns the builds that were under way.
func (m *Manager) forgetTemplate(k sandbox.Key) ([]*build, error) {
	defer m.templateTurns.lock(k)()
	var dropped []sandbox.Build
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
		dropped, err = dropBuilds(tx, k, func(b sandbox.Build) bool { return !b.Over() })
		return errors.Join(err, templates.Delete(tx, k.String()))
	})
	if err != nil {
		return nil, err
	}
	return m.endDropped(dropped)
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
