package node

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// watches are those who want to know what changes.
type watches struct {
	mu  sync.Mutex // protects all following fields
	all map[*watch]bool
}

// watch holds what sandboxes have become since somebody last looked: who is slow
// misses what was in between, never the last.
type watch struct {
	namespace sandbox.Namespace // empty is all
	wake      chan struct{}     // holds at most one notice to look

	mu      sync.Mutex // protects changed
	changed map[sandbox.ID]sandbox.Sandbox
}

func (ws *watches) begin(n sandbox.Namespace) *watch {
	w := &watch{namespace: n, wake: make(chan struct{}, 1), changed: map[sandbox.ID]sandbox.Sandbox{}}
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.all == nil {
		ws.all = map[*watch]bool{}
	}
	ws.all[w] = true
	return w
}

func (ws *watches) end(w *watch) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	delete(ws.all, w)
}

// note tells everybody what a sandbox has become.
func (ws *watches) note(s sandbox.Sandbox) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for w := range ws.all {
		if w.namespace == "" || w.namespace == s.Namespace {
			w.note(s)
		}
	}
}

func (w *watch) note(s sandbox.Sandbox) {
	w.mu.Lock()
	w.changed[s.ID] = s
	w.mu.Unlock()
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// take returns what has changed, oldest sandbox first.
func (w *watch) take() []sandbox.Sandbox {
	w.mu.Lock()
	changed := w.changed
	w.changed = map[sandbox.ID]sandbox.Sandbox{}
	w.mu.Unlock()
	return slices.SortedFunc(maps.Values(changed), func(a, b sandbox.Sandbox) int {
		if c := a.Created.Compare(b.Created); c != 0 {
			return c
		}
		return strings.Compare(string(a.ID), string(b.ID))
	})
}

// Watch calls each with every sandbox of a namespace, of all if it is empty; then
// synced; and from then on each with every sandbox that has changed, as it is, one
// that has ended included, until ctx ends or a call fails.
func (m *Manager) Watch(ctx context.Context, n sandbox.Namespace, each func(sandbox.Sandbox) error, synced func() error) error {
	if err := m.begin(); err != nil {
		return err
	}
	w := m.watches.begin(n)
	defer m.watches.end(w)
	// What changes while this is read is told afterwards, and is never older.
	err := m.db.View(func(tx *journal.Tx) error {
		return sandboxes.Each(tx, "", func(_ string, s sandbox.Sandbox) error {
			if s.Visible() && s.State != sandbox.Ended && (n == "" || s.Namespace == n) {
				w.mu.Lock()
				defer w.mu.Unlock()
				if _, newer := w.changed[s.ID]; !newer {
					w.changed[s.ID] = s
				}
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	for begun := false; ; {
		for _, s := range w.take() {
			if !s.Visible() {
				continue
			}
			if err := each(s); err != nil {
				return err
			}
		}
		if !begun {
			if err := synced(); err != nil {
				return err
			}
			begun = true
		}
		select {
		case <-w.wake:
		case <-ctx.Done():
			return ctx.Err()
		case <-m.ctx.Done():
			return sandbox.Errorf(sandbox.CodeClosing, "the daemon is shutting down").Try("Watch again when it is back")
		}
	}
}
