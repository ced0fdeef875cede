package node

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// These bound the number of watches: of a principal, of single namespaces, and in total.
// The difference between the last two is kept for principals that see all namespaces.
const (
	maxWatches      = 64
	maxSpaceWatches = 768
	maxAllWatches   = 1024
)

// watchesBegin is how many watches may read all objects at once.
const watchesBegin = 4

// bookmarkEvery is after how long an idle watch gets a bookmark. Proxies in between see that
// both ends are alive.
const bookmarkEvery = 10 * time.Second

// watchedKinds are the kinds of objects that can be watched.
var watchedKinds = []sandbox.Kind{
	sandbox.KindNode, sandbox.KindTemplate, sandbox.KindPool, sandbox.KindSandbox, sandbox.KindFork, sandbox.KindCheckpoint,
}

// watchers counts the watches of each principal.
type watchers struct {
	mu  sync.Mutex // protects all following fields
	by  map[sandbox.Principal]int
	all int
	// spaces counts the watches of single namespaces.
	spaces int
}

// begin admits a watch of a namespace, or of all if the namespace is empty.
func (w *watchers) begin(who sandbox.Principal, n sandbox.Namespace) (end func(), err error) {
	space := 0
	if n != "" {
		space = 1
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.by[who] >= maxWatches || w.all >= maxAllWatches || w.spaces+space > maxSpaceWatches {
		return nil, sandbox.Errorf(sandbox.CodeCapacity, "there are too many watches").
			Because("%q has %d of %d, single namespaces have %d of %d, all have %d of %d", who, w.by[who], maxWatches, w.spaces, maxSpaceWatches, w.all, maxAllWatches).
			Try("End some, or watch several kinds at once")
	}
	if w.by == nil {
		w.by = map[sandbox.Principal]int{}
	}
	w.by[who]++
	w.all++
	w.spaces += space
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.all--
		w.spaces -= space
		if w.by[who]--; w.by[who] == 0 {
			delete(w.by, who)
		}
	}, nil
}

// watch is one watch that is being served.
type watch struct {
	*Manager
	of   sandbox.WatchRequest
	each func(sandbox.Event) error
	at   uint64 // all changes up to this version were sent, or are not wanted
	// spoke is set when an event was sent since the last tick of bookmarks.
	spoke bool
}

// Version returns the resource version that the objects of the node have
// reached.
func (m *Manager) Version(context.Context) (v sandbox.StateVersion, err error) {
	v.ID = m.db.ID()
	err = m.db.View(func(tx *journal.Tx) error { v.Version = tx.Version(); return nil })
	return v, err
}

// Watch calls each with the changes of objects, until ctx ends or a call fails. From
// version 0 it begins with all objects, and then says that it is synced. From another
// resource version it begins with a bookmark.
func (m *Manager) Watch(ctx context.Context, r sandbox.WatchRequest, each func(sandbox.Event) error) error {
	if err := m.begin(); err != nil {
		return err
	}
	if err := m.checkWatch(ctx, r); err != nil {
		return err
	}
	end, err := m.watchers.begin(sandbox.PrincipalOf(ctx), r.Namespace)
	if err != nil {
		return err
	}
	defer end()
	w := &watch{Manager: m, of: r, each: each, at: r.From}
	if r.From == 0 {
		err = w.begin(ctx)
	} else if _, _, _, err = m.changes.after(w.at); err == nil { // a version that is too old gets no bookmark
		err = w.mark(sandbox.EventBookmark)
	}
	if err != nil {
		return err
	}
	return w.follow(ctx)
}

// checkWatch refuses a request from which no watch can begin.
func (m *Manager) checkWatch(ctx context.Context, r sandbox.WatchRequest) error {
	for _, k := range r.Kinds {
		if !slices.Contains(watchedKinds, k) {
			return sandbox.Invalid("kinds", "a %s cannot be watched", k)
		}
	}
	now, err := m.Version(ctx)
	if err != nil {
		return err
	}
	const again = "Forget what is known of this node's objects, and list them again"
	if r.State != "" && r.State != now.ID {
		return sandbox.Errorf(sandbox.CodeOtherState, "the node's state folder is %s, not %s", now.ID, sandbox.Quote(r.State)).
			Because("it was wiped or replaced, or another node has its address").Try(again)
	}
	if r.From > now.Version {
		return sandbox.Errorf(sandbox.CodeOtherState, "resource version %d is in the future", r.From).
			Because("the node is at %d: it has never given that one, or its state folder was restored from a copy", now.Version).Try(again)
	}
	return nil
}

// wants reports whether the watch includes objects of a kind.
func (w *watch) wants(k sandbox.Kind) bool {
	if k == sandbox.KindNode && w.of.Namespace != "" {
		return false
	}
	return len(w.of.Kinds) == 0 || slices.Contains(w.of.Kinds, k)
}

// mark sends the version that the watch has reached.
func (w *watch) mark(t sandbox.EventType) error {
	w.spoke = true
	return w.each(sandbox.Event{Type: t, ResourceVersion: w.at})
}

// begin sends all objects.
func (w *watch) begin(ctx context.Context) error {
	select {
	case w.watchesBegin <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	all, version, err := w.objects()
	<-w.watchesBegin
	if err != nil {
		return err
	}
	for i, c := range all {
		if all[i] = (change{}); ctx.Err() != nil { // freed at once, even if the client is slow
			return ctx.Err()
		}
		if err := w.tell(ctx, c); err != nil {
			return err
		}
	}
	w.at = version
	return w.mark(sandbox.EventSynced)
}

// objects returns all objects of the watch, at one resource version.
func (w *watch) objects() (all []change, version uint64, err error) {
	add := func(kind sandbox.Kind, k sandbox.Key, version uint64, object any) {
		if w.of.Namespace == "" || k.Namespace == w.of.Namespace {
			all = append(all, change{version: version, kind: kind, key: k, object: object})
		}
	}
	known := map[sandbox.ID]*sandbox.Sandbox{}
	if w.wants(sandbox.KindSandbox) {
		for _, b := range w.members() {
			known[b.id] = b.latest()
		}
	}
	err = w.db.View(func(tx *journal.Tx) error {
		version = tx.Version()
		prefix := ""
		if w.of.Namespace != "" {
			prefix = string(w.of.Namespace) + "/"
		}
		if w.wants(sandbox.KindNode) {
			v, _ := nodeRecords.Version(tx, nodeKey)
			add(sandbox.KindNode, sandbox.Key{}, v, nil)
		}
		var errs []error
		if w.wants(sandbox.KindTemplate) {
			errs = append(errs, templates.Each(tx, prefix, func(_ string, t sandbox.Template) error {
				add(sandbox.KindTemplate, t.Key, t.ResourceVersion, nil)
				return nil
			}))
		}
		if w.wants(sandbox.KindPool) {
			errs = append(errs, pools.Each(tx, prefix, func(_ string, p sandbox.Pool) error {
				add(sandbox.KindPool, p.Key, p.ResourceVersion, nil)
				return nil
			}))
		}
		if w.wants(sandbox.KindSandbox) {
			errs = append(errs, sandboxesIn(tx, known, func(s *sandbox.Sandbox) { add(sandbox.KindSandbox, s.Key, s.ResourceVersion, *s) }))
		}
		if w.wants(sandbox.KindFork) {
			errs = append(errs, forks.Each(tx, prefix, func(_ string, f sandbox.Fork) error {
				add(sandbox.KindFork, f.Key, f.ResourceVersion, f)
				return nil
			}))
		}
		if w.wants(sandbox.KindCheckpoint) {
			errs = append(errs, checkpoints.Each(tx, prefix, func(_ string, c sandbox.Checkpoint) error {
				if c.Ready() {
					add(sandbox.KindCheckpoint, c.Key, c.ResourceVersion, c)
				}
				return nil
			}))
		}
		return errors.Join(errs...)
	})
	return all, version, err
}

// sandboxesIn calls f with the sandboxes that a transaction sees. It does not read a
// sandbox again if known has its latest version.
func sandboxesIn(tx *journal.Tx, known map[sandbox.ID]*sandbox.Sandbox, f func(*sandbox.Sandbox)) error {
	return sandboxes.Keys(tx, "", func(id string, version uint64) error {
		s := known[sandbox.ID(id)]
		if s == nil || s.ResourceVersion != version {
			read, _, err := sandboxes.Get(tx, id)
			if err != nil {
				return err
			}
			s = &read
		}
		if s.Visible() {
			f(s)
		}
		return nil
	})
}

// follow sends changes as they come.
func (w *watch) follow(ctx context.Context) error {
	bookmark := time.NewTicker(bookmarkEvery)
	defer bookmark.Stop()
	for {
		next, upTo, more, err := w.changes.after(w.at)
		if err != nil {
			return err
		}
		for _, c := range next {
			if err := ctx.Err(); err != nil {
				return err
			}
			if w.wants(c.kind) && (w.of.Namespace == "" || c.namespace == w.of.Namespace) {
				if err := w.tell(ctx, c); err != nil {
					return err
				}
				w.spoke = true
			}
			w.at = c.version
		}
		if w.at = upTo; more == nil {
			continue
		}
		select {
		case <-more:
		case <-bookmark.C:
			if !w.spoke {
				if err := w.mark(sandbox.EventBookmark); err != nil {
					return err
				}
			}
			w.spoke = false
		case <-ctx.Done():
			return ctx.Err()
		case <-w.ctx.Done():
			return sandbox.Errorf(sandbox.CodeClosing, "the daemon is shutting down").Try("Watch again when it is back")
		}
	}
}

// tell sends a change. If the shown object is composed of several, it is read now. It may
// then be newer than the change, and a later change sends it again. If it no longer
// exists, a later change says so.
func (w *watch) tell(ctx context.Context, c change) error {
	e := sandbox.Event{Type: sandbox.EventObject, ResourceVersion: c.version, Kind: c.kind}
	if c.deleted {
		e.Type = sandbox.EventDeleted
	}
	var err error
	switch object := c.object.(type) {
	case sandbox.Sandbox:
		e.Sandbox = &object
	case sandbox.Fork:
		object.ResourceVersion, e.Fork = c.version, &object
	case sandbox.Template:
		object.ResourceVersion, e.Template = c.version, &object
	case sandbox.Pool:
		object.ResourceVersion, e.Pool = c.version, &object
	case sandbox.Checkpoint:
		object.ResourceVersion = c.version
		e.Checkpoint = &sandbox.CheckpointSize{Checkpoint: object}
		if !c.deleted {
			*e.Checkpoint, err = sized(w.Manager, object)
		}
	default:
		err = w.read(ctx, c, &e)
	}
	if sandbox.HasCode(err, sandbox.CodeNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	return w.each(e)
}

// read reads the object of an event.
func (w *watch) read(ctx context.Context, c change, e *sandbox.Event) error {
	switch c.kind {
	case sandbox.KindNode:
		n, err := w.Node(ctx)
		n.ResourceVersion = max(n.ResourceVersion, c.version)
		e.Node = &n
		return err
	case sandbox.KindTemplate:
		t, err := w.Template(ctx, c.key)
		if err == nil {
			e.Builds, err = w.Builds(ctx, t)
		}
		e.Template = &t
		return err
	default:
		p, status, err := w.Pool(ctx, c.key)
		e.Pool, e.PoolStatus = &p, status
		return err
	}
}
