package node

import (
	"slices"
	"sync"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// Of the changes of objects the last ones are kept in memory, so many and so many bytes of
// objects at most. Whoever watches reads them there, at a pace of his own: a watch has a
// number, that of the change that it has read last, and nothing else. One that is so slow
// that the change after it is not kept any more ends as too old.
const (
	keepChanges     = 32 << 10
	keepChangeBytes = 64 << 20
	// changeCost is what a change takes beside its object, about.
	changeCost = 256
)

// change is what became of an object.
type change struct {
	version   uint64
	kind      sandbox.Kind
	namespace sandbox.Namespace // empty for the node
	key       sandbox.Key
	deleted   bool
	// object is a sandbox.Sandbox, Fork or Checkpoint as it is; of what was deleted also
	// a Template or Pool. The others are read when they are told of.
	object any
	size   int
}

// changes are those that are kept.
type changes struct {
	mu  sync.Mutex // protects all following fields
	all []change   // in the order of their versions
	// bytes is what all takes.
	bytes int
	// floor is the version after which all changes are kept, last that of the last write.
	floor, last uint64
	// more is closed with the next write.
	more chan struct{}
	// keep and keepBytes bound what is kept.
	keep, keepBytes int
}

func newChanges(version uint64) *changes {
	return &changes{floor: version, last: version, more: make(chan struct{}), keep: keepChanges, keepBytes: keepChangeBytes}
}

// note takes what was committed. It waits for nobody.
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
		cs.all, cs.bytes, cs.floor = nil, 0, c.Version // it may be in the journal or not
	}
	for _, v := range visible {
		cs.all, cs.bytes = append(cs.all, v), cs.bytes+v.size
	}
	drop := 0
	for drop < len(cs.all) && (len(cs.all)-drop > cs.keep || cs.bytes > cs.keepBytes) {
		cs.floor, cs.bytes = cs.all[drop].version, cs.bytes-cs.all[drop].size
		cs.all[drop] = change{} // its object is not kept
		drop++
	}
	// append moves what is left to a new array now and then, without those.
	cs.all = cs.all[drop:]
	close(cs.more)
	cs.more = make(chan struct{})
}

// watchStep is how many changes a watch takes at once.
const watchStep = 256

// after are the next changes after a version, and the version up to which there are no
// others. Without any, more is closed when it is worth asking again.
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

// seen is what whoever watches sees of a write, if anything.
func seen(c journal.Change) (out change, visible bool) {
	out = change{version: c.Version, deleted: c.Object == nil, object: c.Object, size: c.Size + len(c.Before) + changeCost}
	switch c.Collection {
	case string(sandboxes):
		// One that ends is written to those that have ended as well.
		s, ok := c.Object.(sandbox.Sandbox)
		out.kind, out.key, visible = sandbox.KindSandbox, s.Key, ok && s.Visible()
	case string(ended):
		// Those that are forgotten were deleted long ago.
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
		// It is a part of its template. One that is deleted is of another revision than the
		// template, or is made again.
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

// changed is the object of a write: as it is, or as it was before it was deleted.
func changed[T any](of journal.Collection[T], c journal.Change) (object T, ok bool) {
	if c.Object != nil {
		object, ok = c.Object.(T)
		return object, ok
	}
	object, err := of.Decode(c.Key, c.Before)
	return object, err == nil
}
