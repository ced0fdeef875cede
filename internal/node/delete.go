package node

import (
	"context"
	"errors"
	"fmt"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// DeleteTemplate deletes a template that no pool uses, and its builds.
func (m *Manager) DeleteTemplate(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) error {
	if err := m.begin(); err != nil {
		return err
	}
	ended, err := m.forgetTemplate(ctx, k, when)
	if err != nil {
		return err
	}
	for _, run := range ended {
		select {
		case <-run.done:
		case <-ctx.Done(): // the build ends and cleans up in the background
			return fmt.Errorf("end the builds of template %s: %w", k.Name, ctx.Err())
		}
	}
	return m.collectBuilds()
}

// forgetTemplate removes a template and its builds from the journal and from memory. It
// returns the builds that were under way.
func (m *Manager) forgetTemplate(ctx context.Context, k sandbox.Key, when []sandbox.Precondition) ([]*build, error) {
	defer m.templateTurns.lock(k)()
	var dropped []sandbox.Build
	err := m.db.Update(func(tx *journal.Tx) error {
		now, found, err := templates.Get(tx, k.String())
		if err != nil || !found {
			return errors.Join(err, sandbox.NotFound(sandbox.KindTemplate, k))
		}
		templateVersion(tx, &now)
		if err := mayDelete(ctx, now.Identity(), when); err != nil {
			return err
		}
		if pool, used := m.tally.poolOf(k); used {
			return sandbox.Errorf(sandbox.CodeConflict, "template %s is in use", k.Name).
				Because("pool %s keeps sandboxes of it", pool).Try("Delete the pool first")
		}
		dropped, err = dropBuilds(tx, k, func(b sandbox.Build) bool { return !b.Over() })
		return errors.Join(err, templates.Delete(tx, k.String()))
	})
	if err != nil {
		return nil, err
	}
	return m.endDropped(dropped)
}

// DeleteFork ends the remaining children of a fork, and forgets the fork. A fork that is
// being made fails, and gets no children.
func (m *Manager) DeleteFork(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) error {
	if err := m.begin(); err != nil {
		return err
	}
	f, err := m.ForkOf(ctx, k)
	if err == nil {
		err = errors.Join(f.Identity().Meets(when...), m.mayEnd(ctx, f))
	}
	for forgotten := false; err == nil && !forgotten; {
		if err = m.endChildren(ctx, f); err == nil {
			f, forgotten, err = m.forgetForkAsIs(f)
		}
	}
	return err
}

// mayEnd refuses to delete a fork whose children have, had or will have owners, unless the
// principal may own objects. Even if all children have ended, their controller may still
// have to hear of it.
func (m *Manager) mayEnd(ctx context.Context, f sandbox.Fork) error {
	if f.Asked != nil && !sandbox.MayOwn(ctx) {
		return sandbox.Errorf(sandbox.CodeDenied, "fork %s is not yours to change", f.Name).Because("its children have owners")
	}
	for _, c := range f.Children {
		m.mu.Lock()
		b := m.roster.byID[c.ID]
		m.mu.Unlock()
		if b == nil {
			continue
		}
		if err := sandbox.MayChange(ctx, b.now().Identity()); err != nil {
			return err
		}
	}
	return nil
}

// mayDelete refuses to delete an object that does not meet the preconditions, or whose owner
// forbids it to the principal.
func mayDelete(ctx context.Context, o sandbox.Identity, when []sandbox.Precondition) error {
	return errors.Join(o.Meets(when...), sandbox.MayChange(ctx, o))
}

// forgetForkAsIs forgets a fork, unless it was completed since f was read. Then it
// returns the completed fork.
func (m *Manager) forgetForkAsIs(f sandbox.Fork) (now sandbox.Fork, forgotten bool, err error) {
	err = m.db.Update(func(tx *journal.Tx) error {
		at, found, err := forks.Get(tx, f.String())
		switch {
		case err != nil:
			return err
		case !found || !at.Created.Equal(f.Created): // another call has forgotten it
			forgotten = true
			return nil
		case at.Phase != f.Phase:
			now = at
			return nil
		}
		forgotten = true
		return forks.Delete(tx, f.String())
	})
	return now, forgotten, err
}

// endChildren ends the remaining children of a fork.
func (m *Manager) endChildren(ctx context.Context, f sandbox.Fork) error {
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
		var err error
		if b.now().State != sandbox.Ended {
			err = b.ended(sandbox.ReasonKilled, "its fork was deleted")
		}
		b.unlock()
		if err != nil {
			return err
		}
	}
	return nil
}
