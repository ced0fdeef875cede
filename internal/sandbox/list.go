package sandbox

import (
	"errors"
	"slices"
	"strings"

	"agentrun.dev/internal/node/journal"
)

// Template returns a template.
func (m *Manager) Template(k Key) (t Template, err error) { return get(m, templates, KindTemplate, k) }

// Pool returns a pool and what it has.
func (m *Manager) Pool(k Key) (Pool, PoolStatus, error) {
	p, err := get(m, pools, KindPool, k)
	if err != nil {
		return p, PoolStatus{}, err
	}
	return p, m.poolStatus(k), nil
}

func (m *Manager) poolStatus(k Key) PoolStatus {
	m.mu.Lock()
	p := m.pools[k]
	m.mu.Unlock()
	if p == nil {
		return PoolStatus{Phase: PhasePending}
	}
	return p.status()
}

// ForkOf returns a fork.
func (m *Manager) ForkOf(k Key) (Fork, error) { return get(m, forks, KindFork, k) }

func get[T any](m *Manager, c journal.Collection[T], kind Kind, k Key) (object T, err error) {
	err = m.db.View(func(tx *journal.Tx) error {
		var found bool
		if object, found, err = c.Get(tx, k.String()); err == nil && !found {
			err = notFound(kind, k)
		}
		return err
	})
	return object, err
}

// Sandbox returns a sandbox. Looking at it does not wake it.
func (m *Manager) Sandbox(k Key) (Sandbox, error) {
	b, err := m.find(k)
	if err != nil {
		return Sandbox{}, err
	}
	if s := b.now(); s.State != Starting {
		return s, nil
	}
	return Sandbox{}, notFound(KindSandbox, k)
}

// Page is a part of a list.
type Page struct {
	// After is the last name of the page before; empty is the first page.
	After string
	// Limit is how many objects it has at most; 0 is 100.
	Limit int
}

// Bounds of a page.
const (
	defaultPage = 100
	maxPage     = 1001 // one more than a client sees, to tell whether there is more
)

func (p Page) limit() int {
	if p.Limit <= 0 {
		return defaultPage
	}
	return min(p.Limit, maxPage)
}

// errEnough ends a walk through a collection.
var errEnough = errors.New("enough")

// Templates lists templates by name.
func (m *Manager) Templates(n Namespace, p Page) ([]Template, error) { return list(m, templates, n, p) }

// Pools lists pools by name.
func (m *Manager) Pools(n Namespace, p Page) ([]Pool, error) { return list(m, pools, n, p) }

// Forks lists forks by name.
func (m *Manager) Forks(n Namespace, p Page) ([]Fork, error) { return list(m, forks, n, p) }

func list[T any](m *Manager, c journal.Collection[T], n Namespace, p Page) ([]T, error) {
	return listIf(m, c, n, p, func(T) bool { return true })
}

// listIf is list of those objects that are to be seen.
func listIf[T any](m *Manager, c journal.Collection[T], n Namespace, p Page, seen func(T) bool) (out []T, err error) {
	prefix := string(n) + "/"
	err = m.db.View(func(tx *journal.Tx) error {
		return c.Each(tx, prefix, func(key string, object T) error {
			if strings.TrimPrefix(key, prefix) <= p.After || !seen(object) {
				return nil
			}
			if len(out) == p.limit() {
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
func (m *Manager) Sandboxes(n Namespace, p Page, ended bool) (out []Sandbox, err error) {
	err = m.db.View(func(tx *journal.Tx) error {
		return sandboxes.Each(tx, "", func(_ string, s Sandbox) error {
			if s.Namespace == n && s.State != Starting && (ended || s.State != Ended) {
				out = append(out, s)
			}
			return nil
		})
	})
	slices.SortFunc(out, func(a, b Sandbox) int { return strings.Compare(a.Position(), b.Position()) })
	out = slices.DeleteFunc(out, func(s Sandbox) bool { return s.Position() <= p.After })
	return out[:min(len(out), p.limit())], err
}

// Position orders sandboxes: names may be used again after an end.
func (s Sandbox) Position() string { return string(s.Name) + "/" + string(s.ID) }

// historySize is how many ended sandboxes are remembered, at least, and
// historyStep how many more before the oldest are forgotten.
const (
	historySize = 1000
	historyStep = 100
)

// trimHistory is called for each sandbox that ends, and forgets those that ended
// first, now and then.
func (m *Manager) trimHistory() {
	m.mu.Lock()
	m.ends++
	due := m.ends%historyStep == 0
	m.mu.Unlock()
	if !due {
		return
	}
	err := m.db.Update(func(tx *journal.Tx) error {
		var ended []Sandbox
		err := sandboxes.Each(tx, "", func(_ string, s Sandbox) error {
			if s.State == Ended {
				ended = append(ended, s)
			}
			return nil
		})
		if err != nil || len(ended) <= historySize {
			return err
		}
		slices.SortFunc(ended, func(a, b Sandbox) int { return b.Ended.Compare(a.Ended) })
		for _, s := range ended[historySize:] {
			err = errors.Join(err, sandboxes.Delete(tx, string(s.ID)))
		}
		return err
	})
	if err != nil {
		m.cfg.Log.Error("trim the history of sandboxes", "error", err)
	}
}
