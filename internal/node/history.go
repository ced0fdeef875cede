package node

import (
	"errors"
	"slices"
	"sync"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// ended has the sandboxes that have ended, by namespace, name and id: in the order of
// lists.
var ended = journal.Collection[sandbox.Sandbox]("ended")

func endedKey(s sandbox.Sandbox) string { return string(s.Namespace) + "/" + s.Position() }

// These bound the history of ended sandboxes: its records and bytes per namespace,
// and its bytes in total. Each end forgets at most forgetStep.
const (
	historyRecords = 1000
	historyBytes   = 4 << 20
	historyTotal   = 64 << 20
	forgetStep     = 16
)

// history knows which sandboxes have ended, and in which order.
type history struct {
	mu     sync.Mutex // protects all following fields
	spaces map[sandbox.Namespace]*past
	bytes  int
}

// past is the history of a namespace.
type past struct {
	order []end // the first end first
	bytes int
	last  map[sandbox.Name]sandbox.ID // the last to end under each name
}

// end is the part of an ended sandbox that is kept in memory.
type end struct {
	sandbox.Key
	id    sandbox.ID
	bytes int
}

func (e end) String() string { return e.Key.String() + "/" + string(e.id) }

// write writes the record of a sandbox to its collection. If the sandbox has ended, it
// moves its record, and forgets the oldest ones beyond the bounds.
func (m *Manager) write(tx *journal.Tx, s *sandbox.Sandbox) (done func(), err error) {
	if s.State != sandbox.Ended {
		return func() {}, sandboxes.Write(tx, string(s.ID), s)
	}
	err = writeEnded(tx, s)
	e := end{s.Key, s.ID, ended.Size(tx, endedKey(*s))}
	old := m.history.surplus(e)
	for _, o := range old {
		err = errors.Join(err, ended.Delete(tx, o.String()))
	}
	return func() { m.history.add(e, old) }, err
}

// writeEnded moves the record of a sandbox that has ended.
func writeEnded(tx *journal.Tx, s *sandbox.Sandbox) error {
	return errors.Join(sandboxes.Delete(tx, string(s.ID)), ended.Write(tx, endedKey(*s), s), endOwner(tx, *s))
}

// surplus returns the ends to forget when next is added.
func (h *history) surplus(next end) (out []end) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.spaces[next.Namespace]
	if p == nil {
		p = &past{}
	}
	count, bytes, total := len(p.order)+1, p.bytes+next.bytes, h.bytes+next.bytes
	for _, e := range p.order {
		if len(out) == forgetStep || count <= historyRecords && bytes <= historyBytes {
			break
		}
		out = append(out, e)
		count, bytes, total = count-1, bytes-e.bytes, total-e.bytes
	}
	if total <= historyTotal {
		return out
	}
	// The namespace with the most bytes forgets.
	most := p
	for _, other := range h.spaces {
		if other.bytes > most.bytes {
			most = other
		}
	}
	skip := 0
	if most == p {
		skip = len(out)
	}
	for _, e := range most.order[min(skip, len(most.order)):] {
		if len(out) == forgetStep || total <= historyTotal {
			break
		}
		out = append(out, e)
		total -= e.bytes
	}
	return out
}

// add adds an end, and removes the forgotten ones.
func (h *history) add(next end, forgotten []end) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.spaces == nil {
		h.spaces = map[sandbox.Namespace]*past{}
	}
	p := h.spaces[next.Namespace]
	if p == nil {
		p = &past{last: map[sandbox.Name]sandbox.ID{}}
		h.spaces[next.Namespace] = p
	}
	p.order = append(p.order, next)
	p.last[next.Name] = next.id
	p.bytes += next.bytes
	h.bytes += next.bytes
	for _, e := range forgotten {
		h.forget(e)
	}
}

// forget removes an end; the caller holds the mutex. Two ends that were committed
// together may have forgotten the same one.
func (h *history) forget(e end) {
	p := h.spaces[e.Namespace]
	if p == nil {
		return
	}
	for i, o := range p.order[:min(len(p.order), 2*forgetStep)] {
		if o.id != e.id {
			continue
		}
		p.order = slices.Delete(p.order, i, i+1)
		p.bytes -= o.bytes
		h.bytes -= o.bytes
		if p.last[o.Name] == o.id {
			delete(p.last, o.Name)
		}
		break
	}
	if len(p.order) == 0 {
		delete(h.spaces, e.Namespace)
	}
}

// lastOf returns the sandbox that ended last under a name, if it is remembered.
func (h *history) lastOf(k sandbox.Key) (end, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p := h.spaces[k.Namespace]; p != nil {
		id, ok := p.last[k.Name]
		return end{Key: k, id: id}, ok
	}
	return end{}, false
}

// recoverHistory reads the ended sandboxes from the journal.
func (m *Manager) recoverHistory() error {
	type dated struct {
		end
		at time.Time
	}
	var all []dated
	err := m.db.View(func(tx *journal.Tx) error {
		return ended.Each(tx, "", func(key string, s sandbox.Sandbox) error {
			all = append(all, dated{end{s.Key, s.ID, ended.Size(tx, key)}, s.Ended})
			return nil
		})
	})
	slices.SortFunc(all, func(a, b dated) int { return a.at.Compare(b.at) })
	for _, e := range all {
		m.history.add(e.end, nil)
	}
	return err
}
