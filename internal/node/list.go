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
	return get(m, templates, sandbox.KindTemplate, k, templateVersion)
}

// templateVersion raises the resource version of a template to that of its builds,
// which are shown with it.
func templateVersion(tx *journal.Tx, t *sandbox.Template) {
	for _, stage := range []sandbox.Stage{sandbox.AfterReady, sandbox.AfterInit} {
		v, _ := builds.Version(tx, buildKey{Template: t.Key, Revision: t.Revision, Stage: stage}.String())
		t.ResourceVersion = max(t.ResourceVersion, v)
	}
}

// poolVersion raises the resource version of a pool to that of its status, which is shown
// with it.
func poolVersion(tx *journal.Tx, p *sandbox.Pool) {
	v, _ := poolStatuses.Version(tx, p.Key.String())
	p.ResourceVersion = max(p.ResourceVersion, v)
}

// ownVersion keeps the resource version of an object that is shown as it was
// written.
func ownVersion[T any](*journal.Tx, *T) {}

// Pool returns a pool and its status.
func (m *Manager) Pool(_ context.Context, k sandbox.Key) (sandbox.Pool, sandbox.PoolStatus, error) {
	p, err := get(m, pools, sandbox.KindPool, k, poolVersion)
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
	return get(m, forks, sandbox.KindFork, k, ownVersion)
}

func get[T any](m *Manager, c journal.Collection[T], kind sandbox.Kind, k sandbox.Key, version func(*journal.Tx, *T)) (object T, err error) {
	err = m.db.View(func(tx *journal.Tx) error {
		var found bool
		if object, found, err = c.Get(tx, k.String()); err == nil && !found {
			err = sandbox.NotFound(kind, k)
		}
		version(tx, &object)
		return err
	})
	return object, err
}

// Sandbox returns a sandbox. It does not wake the sandbox.
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

// errEnough stops a walk through a collection.
var errEnough = errors.New("enough")

// Templates lists templates by name.
func (m *Manager) Templates(_ context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Template, error) {
	return list(m, templates, n, p, templateVersion)
}

// Pools lists pools by name.
func (m *Manager) Pools(_ context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Pool, error) {
	return list(m, pools, n, p, poolVersion)
}

// Forks lists forks by name.
func (m *Manager) Forks(_ context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Fork, error) {
	return list(m, forks, n, p, ownVersion)
}

func list[T any](m *Manager, c journal.Collection[T], n sandbox.Namespace, p sandbox.Page, version func(*journal.Tx, *T)) ([]T, error) {
	return listIf(m, c, n, p, version, func(T) bool { return true })
}

// listIf lists the objects that seen accepts. Without a namespace it lists those of all, and
// a page begins after the key of an object.
func listIf[T any](m *Manager, c journal.Collection[T], n sandbox.Namespace, p sandbox.Page, version func(*journal.Tx, *T), seen func(T) bool) (out []T, err error) {
	prefix := ""
	if n != "" {
		prefix = string(n) + "/"
	}
	bytes := 0
	err = m.db.View(func(tx *journal.Tx) error {
		return c.EachAfter(tx, prefix, p.After, func(k string, object T) error {
			if !seen(object) {
				return nil
			}
			if len(out) == p.Most() {
				return errEnough
			}
			version(tx, &object)
			out = append(out, object)
			if bytes += c.Size(tx, k); p.Bytes > 0 && bytes >= p.Bytes {
				return errEnough
			}
			return nil
		})
	})
	if errors.Is(err, errEnough) {
		err = nil
	}
	return out, err
}

// Sandboxes lists sandboxes by name; without a namespace, those of all. Ended sandboxes are
// listed only on request, and only for one namespace.
func (m *Manager) Sandboxes(_ context.Context, r sandbox.SandboxesRequest) (out []sandbox.Sandbox, err error) {
	if r.Namespace == "" && r.Ended {
		return nil, sandbox.Invalid("ended", "sandboxes that have ended are listed of one namespace")
	}
	// A record is written to the journal before it is changed in memory. So the one in
	// memory may be older than an event of a watch. The resource version in the journal
	// tells whether it is the latest.
	live := map[sandbox.ID]bool{}
	walk := m.eachMemberOf(r.Namespace, r.Page.After)
	for left := r.Page.Most(); left > 0; {
		some := walk(left)
		if len(some) == 0 {
			break
		}
		err = m.db.View(func(tx *journal.Tx) error {
			for _, b := range some {
				s, found, err := m.listed(tx, b)
				if err != nil {
					return err
				}
				if found {
					live[s.ID], out, left = true, append(out, s), left-1
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	if !r.Ended {
		return out, nil
	}
	// This comes after the running sandboxes: one that ends meanwhile is in one
	// of the two lists, or in both.
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

// listed returns a sandbox as lists show it: as it is in the journal, and whether it
// answers.
func (m *Manager) listed(tx *journal.Tx, b *member) (s sandbox.Sandbox, found bool, err error) {
	version, found := sandboxes.Version(tx, string(b.id))
	if s = b.now(); found && version > s.ResourceVersion {
		s, found, err = sandboxes.Get(tx, string(b.id))
	}
	return s, found && s.State != sandbox.Starting && s.State != sandbox.Ended, err
}
