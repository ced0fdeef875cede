package node

import (
	"slices"
	"sync"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// The latest changes of objects are kept in memory, bounded by their number and by the
// bytes of their objects. Each watch reads them there, at its own pace. The only state of
// a watch is the number of the change that it has read last. If the change after it is no
// longer kept, because the watch is too slow, the watch ends as too old.
const (
	keepChanges     = 32 << 10
	keepChangeBytes = 64 << 20
	// changeCost is about how many bytes a change takes besides its object.
	changeCost = 256
)

// change is one visible change of an object.
type change struct {
	version   uint64
	kind      sandbox.Kind
	namespace sandbox.Namespace // empty for the node
	key       sandbox.Key
	deleted   bool
	// object is the current sandbox.Sandbox, Fork or Checkpoint. For a deletion it may
	// also be a Template or Pool. Other objects are read when a watch reports them.
	object any
	size   int
}

// changes are the kept changes.
type changes struct {
	mu  sync.Mutex // protects all following fields
	all []change   // in the order of their versions
	// bytes is the size of all.
	bytes int
	// floor is the version after which all changes are kept. last is the version of the
	// last write.
	floor, last uint64
	// more is closed with the next write.
	more chan struct{}
	// keep and keepBytes bound how many changes are kept, and their size.
	keep, keepBytes int
}

func newChanges(version uint64) *changes {
	return &changes{floor: version, last: version, more: make(chan struct{}), keep: keepChanges, keepBytes: keepChangeBytes}
}

// note takes a commit. It does not wait.
func (cs *changes) note(c journal.Commit) {
	var visible []change
	if !c.Failed {
		for _, one := range c.Changes {
			if v, ok := seen(one); ok {
				visible = append(visible, v)
			}
		}
	}
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.last = c.Version; c.Failed {
		cs.all, cs.bytes, cs.floor = nil, 0, c.Version // it may or may not be in the journal
	}
	for _, v := range visible {
		cs.all, cs.bytes = append(cs.all, v), cs.bytes+v.size
	}
	drop := 0
	for drop < len(cs.all) && (len(cs.all)-drop > cs.keep || cs.bytes > cs.keepBytes) {
		cs.floor, cs.bytes = cs.all[drop].version, cs.bytes-cs.all[drop].size
		cs.all[drop] = change{} // lets its object be freed
		drop++
	}
	// So append now and then moves the rest to a new array, without the dropped
	// ones.
	cs.all = cs.all[drop:]
	close(cs.more)
	cs.more = make(chan struct{})
}

// watchStep is how many changes a watch reads at once.
const watchStep = 256

// after returns the next changes after a version, and the version up to which they are
// complete. If there are no changes, more is closed when the caller should ask again.
func (cs *changes) after(version uint64) (next []change, upTo uint64, more <-chan struct{}, err error) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if version < cs.floor {
		return nil, 0, nil, errTooOld(version, cs.floor)
	}
	at, found := slices.BinarySearchFunc(cs.all, version, func(c change, v uint64) int {
		switch {
		case c.version < v:
			return -1
		case c.version > v:
			return 1
		}
		return 0
	})
	if found {
		at++
	}
	if next = slices.Clone(cs.all[at:min(at+watchStep, len(cs.all))]); at+len(next) < len(cs.all) {
		return next, next[len(next)-1].version, nil, nil
	}
	return next, max(version, cs.last), cs.more, nil
}

func errTooOld(version, floor uint64) error {
	return sandbox.Errorf(sandbox.CodeTooOld, "resource version %d is too old", version).
		Because("the node keeps the changes after %d", floor).
		Try("List the objects again, and watch from the resource version of the list")
}

// seen returns the change that watchers see of a write, if it is visible.
func seen(c journal.Change) (out change, visible bool) {
	out = change{version: c.Version, deleted: c.Object == nil, object: c.Object, size: c.Size + len(c.Before) + changeCost}
	switch c.Collection {
	case string(sandboxes):
		// A sandbox that ends is also written to the collection of ended ones.
		s, ok := c.Object.(sandbox.Sandbox)
		out.kind, out.key, visible = sandbox.KindSandbox, s.Key, ok && s.Visible()
	case string(ended):
		// An ended sandbox that is forgotten was reported as deleted long ago.
		s, ok := c.Object.(sandbox.Sandbox)
		out.kind, out.key, out.deleted, visible = sandbox.KindSandbox, s.Key, true, ok
	case string(templates):
		var t sandbox.Template
		if t, visible = changed(templates, c); out.deleted {
			out.object = t
		} else {
			out.object = nil
		}
		out.kind, out.key = sandbox.KindTemplate, t.Key
	case string(builds):
		// A build is reported as a part of its template. A build that is deleted has
		// another revision than the template, or is made again.
		b, ok := c.Object.(sandbox.Build)
		out.kind, out.key, out.object, visible = sandbox.KindTemplate, b.Template, nil, ok
	case string(pools):
		var p sandbox.Pool
		if p, visible = changed(pools, c); out.deleted {
			out.object = p
		} else {
			out.object = nil
		}
		out.kind, out.key = sandbox.KindPool, p.Key
	case string(poolStatuses):
		s, ok := c.Object.(poolRecord)
		out.kind, out.key, out.object, visible = sandbox.KindPool, s.Key, nil, ok
	case string(forks):
		var f sandbox.Fork
		f, visible = changed(forks, c)
		out.kind, out.key, out.object = sandbox.KindFork, f.Key, f
	case string(checkpoints):
		var k sandbox.Checkpoint
		k, visible = changed(checkpoints, c)
		out.kind, out.key, out.object, visible = sandbox.KindCheckpoint, k.Key, k, visible && k.Ready()
	case string(nodeRecords), string(cordons):
		out.kind, out.object, out.deleted, visible = sandbox.KindNode, nil, false, true
	}
	out.namespace = out.key.Namespace
	return out, visible
}

// changed returns the object of a write: the current one, or the one from before
// a deletion.
func changed[T any](of journal.Collection[T], c journal.Change) (object T, ok bool) {
	if c.Object != nil {
		object, ok = c.Object.(T)
		return object, ok
	}
	object, err := of.Decode(c.Key, c.Before)
	return object, err == nil
}
