package node

import (
	"context"
	"errors"
	"slices"
	"strings"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// Template returns a template.
func (m *Manager) Template(_ context.Context, k sandbox.Key) (t sandbox.Template, err error) {
	return get(m, templates, sandbox.KindTemplate, k)
}

// Pool returns a pool and what it has.
func (m *Manager) Pool(_ context.Context, k sandbox.Key) (sandbox.Pool, sandbox.PoolStatus, error) {
	p, err := get(m, pools, sandbox.KindPool, k)
	if err != nil {
		return p, sandbox.PoolStatus{}, err
	}
	return p, m.poolStatus(k), nil
}

func (m *Manager) poolStatus(k sandbox.Key) sandbox.PoolStatus {
	m.mu.Lock()
	p := m.pools[k]
	m.mu.Unlock()
	if p == nil {
		return sandbox.PoolStatus{Phase: sandbox.PhasePending}
	}
	return p.status()
}

// ForkOf returns a fork.
func (m *Manager) ForkOf(_ context.Context, k sandbox.Key) (sandbox.Fork, error) {
	return get(m, forks, sandbox.KindFork, k)
}

func get[T any](m *Manager, c journal.Collection[T], kind sandbox.Kind, k sandbox.Key) (object T, err error) {
	err = m.db.View(func(tx *journal.Tx) error {
		var found bool
		if object, found, err = c.Get(tx, k.String()); err == nil && !found {
			err = sandbox.NotFound(kind, k)
		}
		return err
	})
	return object, err
}

// Sandbox returns a sandbox. Looking at it does not wake it.
func (m *Manager) Sandbox(_ context.Context, k sandbox.Key) (sandbox.Sandbox, error) {
	b, err := m.find(k)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if s := b.now(); s.State != sandbox.Starting {
		return s, nil
	}
	return sandbox.Sandbox{}, sandbox.NotFound(sandbox.KindSandbox, k)
}

// errEnough ends a walk through a collection.
var errEnough = errors.New("enough")

// Templates lists templates by name.
func (m *Manager) Templates(_ context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Template, error) {
	return list(m, templates, n, p)
}

// Pools lists pools by name.
func (m *Manager) Pools(_ context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Pool, error) {
	return list(m, pools, n, p)
}

// Forks lists forks by name.
func (m *Manager) Forks(_ context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Fork, error) {
	return list(m, forks, n, p)
}

func list[T any](m *Manager, c journal.Collection[T], n sandbox.Namespace, p sandbox.Page) ([]T, error) {
	return listIf(m, c, n, p, func(T) bool { return true })
}

// listIf is list of those objects that are to be seen.
func listIf[T any](m *Manager, c journal.Collection[T], n sandbox.Namespace, p sandbox.Page, seen func(T) bool) (out []T, err error) {
	prefix := string(n) + "/"
	err = m.db.View(func(tx *journal.Tx) error {
		return c.EachAfter(tx, prefix, p.After, func(_ string, object T) error {
			if !seen(object) {
				return nil
			}
			if len(out) == p.Most() {
				return errEnough
			}
			out = append(out, object)
			return nil
		})
	})
	if errors.Is(err, errEnough) {
		err = nil
	}
	return out, err
}

// Sandboxes lists sandboxes by name; ended ones only if they are asked for.
func (m *Manager) Sandboxes(_ context.Context, r sandbox.SandboxesRequest) (out []sandbox.Sandbox, err error) {
	live := map[sandbox.ID]bool{}
	m.eachMember(r.Namespace, r.Page.After, func(b *member) bool {
		if s := b.now(); s.State != sandbox.Starting && s.State != sandbox.Ended {
			live[s.ID], out = true, append(out, s)
		}
		return len(out) < r.Page.Most()
	})
	if !r.Ended {
		return out, nil
	}
	// Not before: one that ends meanwhile is in one of the two, or in both.
	err = m.db.View(func(tx *journal.Tx) error {
		left := r.Page.Most()
		return ended.EachAfter(tx, string(r.Namespace)+"/", r.Page.After, func(_ string, s sandbox.Sandbox) error {
			if !live[s.ID] {
				left, out = left-1, append(out, s)
			}
			if left == 0 {
				return errEnough
			}
			return nil
		})
	})
	if errors.Is(err, errEnough) {
		err = nil
	}
	slices.SortFunc(out, func(a, b sandbox.Sandbox) int { return strings.Compare(a.Position(), b.Position()) })
	return out[:min(len(out), r.Page.Most())], err
}
